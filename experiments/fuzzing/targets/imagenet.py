"""Target: archives of ILSVRC2012, with tar files in a tar file and the development kit with its MATLAB file."""

from __future__ import annotations

import gzip
import io
import random
import struct
from pathlib import Path

import numpy as np
from scipy.io import savemat

from fuzzing import oracle
from fuzzing.attacks import tars
from fuzzing.attacks.binary import rough, small
from fuzzing.seeds import Members, png, tar
from fuzzing.target import Case, Files, FileTarget
from fuzzing.targets.sources import read_source

SYNSETS = {2: "n00000001", 1: "n00000002", 3: "n00000003"}
"""WordNet id of each class by its number in the development kit."""
KIT, FOLDER = "ILSVRC2012_devkit_t12.tar.gz", "ILSVRC2012_devkit_t12"
TRAIN, VAL = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
PLACES = (f"{FOLDER}/data/meta.mat", f"{FOLDER}/data/ILSVRC2012_validation_ground_truth.txt")


class ImageNet(FileTarget):
    """ImageNet as published."""

    what = "ImageNet's tar files of tar files, and its kit"
    tokens = (b"ustar\x0000", b"n00000001.tar", b"ILSVRC2012_val_00000001.JPEG", b"\0" * 512)

    def __init__(self, home: Path) -> None:
        self._classes: list[Members] = [
            [(f"{synset}_{i}.JPEG", png(3 * number + i)) for i in range(3)] for number, synset in SYNSETS.items()
        ]
        self._val = [(f"ILSVRC2012_val_{i + 1:08d}.JPEG", png(20 + i)) for i in range(4)]
        self._right = {image for one in (*self._classes, self._val) for _, image in one}
        self._outer = [(f"{one[0][0][:9]}.tar", tar(one)) for one in self._classes]
        truth = b"1\n3\n2\n2\n"
        self.seeds = [
            {TRAIN: tar(self._outer), VAL: tar(self._val), KIT: kit(table(compressed), truth)}
            for compressed in (True, False)
        ]
        self._inside = [(table(True), truth), (table(False), truth)]
        self.attacks = (self._table, self._table, self._tar, self._inner)

    def _table(self, draw: random.Random, files: Files) -> str:
        """Change the files in the development kit."""
        inside = list(draw.choice(self._inside))
        which = int(draw.random() < 0.2)
        if draw.random() < 0.5:
            data = bytearray(inside[which])
            for _ in range(draw.randint(1, 4)):
                place = 4 * draw.randrange(len(data) // 4)
                struct.pack_into("<I", data, place, draw.choice((0, 1, 8, 14, 15, 1 << 31, 0xFFFFFFFF, len(data))))
            inside[which] = bytes(data)
        else:
            edited = small if draw.random() < 0.7 else rough
            inside[which], _ = edited(draw, inside[which], (), (b"\x0e\0\0\0", b"\x0f\0\0\0", b"synsets\0"))
        files[KIT] = kit(*inside)
        return "what the kit holds"

    def _tar(self, draw: random.Random, files: Files) -> str:
        name = draw.choice((TRAIN, VAL))
        files[name], words = tars.attack(draw, self._outer if name == TRAIN else self._val, "cls")
        return f"{name}: {words}"

    def _inner(self, draw: random.Random, files: Files) -> str:
        """Put a hostile tar file into a valid one."""
        outer, place = list(self._outer), draw.randrange(len(self._outer))
        data, words = tars.attack(draw, self._classes[place], "cls")
        outer[place] = (outer[place][0], data)
        files[TRAIN] = tar(outer)
        return f"inside {outer[place][0]}: {words}"

    def read(self, case: Case) -> None:
        found = read_source(case.place)
        if case.untouched and {image for images in found.values() for image, _ in images} != self._right:
            raise oracle.Wrong("the images of a seed are not what was written")


def table(compressed: bool) -> bytes:
    """Return the table of synsets as a MATLAB file."""
    fields = ("ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children")
    rows = [(number, synset, f"class {number}", "", 0, np.zeros((1, 0))) for number, synset in sorted(SYNSETS.items())]
    rows.append((4, "n00000009", "a group", "", 2, np.array([[1, 2]])))
    cells = np.empty((len(rows), 1), [(field, object) for field in fields])
    for place, row in enumerate(rows):
        cells[place, 0] = row
    file = io.BytesIO()
    savemat(file, {"synsets": cells}, do_compression=compressed)
    return file.getvalue()


def kit(meta: bytes, truth: bytes) -> bytes:
    """Return the development kit.

    meta: MATLAB file. truth: labels of the validation images.
    """
    return gzip.compress(tar(zip(PLACES, (meta, truth), strict=True)), 1, mtime=0)
