"""Target: CIFAR archives, as published and mutated."""

from __future__ import annotations

import gzip
import random
import tarfile
from pathlib import Path

import numpy as np

from fuzzing import oracle
from fuzzing.attacks import pickles, tar_headers, tars
from fuzzing.attacks.images import BOMB_BYTES, gzip_zeros
from fuzzing.seeds import Members, tar
from fuzzing.target import Case, Files, FileTarget
from fuzzing.targets.sources import read_source


class Cifar(FileTarget):
    """CIFAR-10 and CIFAR-100, binary and pickled, as folders and archives."""

    what = "CIFAR, binary and pickled, as folders and as archives"
    tokens = (
        b"c",
        b"R",
        b".",
        b"(",
        b"t",
        b"}",
        b"q\0",
        b"h\0",
        b"K\xff",
        b"data",
        b"labels",
        b"cos\nsystem\n",
        b"\x80\x02",
    )

    def __init__(self, home: Path) -> None:
        draw = np.random.default_rng(0)
        ten = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
        self._folders: list[Members] = []
        for names, fine, binary in (
            (ten, False, True),
            (ten, False, False),
            (["train", "test"], True, True),
            (["train", "test"], True, False),
        ):
            files = []
            for name in names:
                pixels, labels = draw.integers(0, 256, (2, 3072), dtype=np.uint8), [0, 1]
                if binary:
                    rows = [
                        bytes([label] * (1 + fine)) + row.tobytes() for label, row in zip(labels, pixels, strict=True)
                    ]
                    files.append((f"{name}.bin", b"".join(rows)))
                else:
                    files.append(
                        (name, pickles.plain({b"data": pixels, b"fine_labels" if fine else b"labels": labels}))
                    )
            many = [f"c{i}".encode() for i in range(100 if fine else 10)]
            words = ("fine_label_names.txt" if fine else "batches.meta.txt", b"\n".join(many) + b"\n")
            known = (
                "meta" if fine else "batches.meta",
                pickles.plain({b"fine_label_names" if fine else b"label_names": many}),
            )
            self._folders.append([*files, words if binary else known])
        self.seeds = [dict(files) for files in self._folders]
        for files in self._folders:
            inside = [(f"cifar/{name}", data) for name, data in files]
            self.seeds.append({"cifar.tar.gz": gzip.compress(tar(inside), mtime=0)})
        self.attacks = (self._pickle, self._pickle, self._pickle, self._archive, self._archive)

    def _pickle(self, draw: random.Random, files: Files) -> str:
        """Replace a pickle by a hostile one, or numbers in it."""
        number = draw.choice((1, 3))
        members = dict(self._folders[number])
        name = draw.choice(sorted(members))
        if draw.random() < 0.5:
            members[name], words = pickles.hostile(draw)
        else:
            members[name], words = pickles.renumbered(draw, members[name])
        files.clear()
        if draw.random() < 0.2:
            files["cifar.tar.gz"] = gzip.compress(tar(members.items()), mtime=0)
        else:
            files |= members
        return f"{name}: {words}"

    def _archive(self, draw: random.Random, files: Files) -> str:
        number = draw.randrange(4)
        members = [(f"cifar/{name}", data) for name, data in self._folders[number]]
        whole, words = tars.attack(draw, members, "cls") if draw.random() < 0.7 else (tar(members), "packed anew")
        files.clear()
        kind = draw.choice(("gz", "gz", "plain", "cut", "bomb", "inner bomb"))
        packed = gzip.compress(whole, mtime=0)
        if kind == "bomb":
            packed = gzip_zeros()
        elif kind == "inner bomb":  # a huge member in a small archive
            name = members[0][0].encode()
            parts = tar_headers.header(name, BOMB_BYTES), tar(members[1:], tarfile.USTAR_FORMAT)
            packed = gzip.compress(parts[0], mtime=0) + gzip_zeros() + gzip.compress(parts[1], mtime=0)
        elif kind == "cut":
            packed = packed[: draw.randrange(len(packed))]
        name = draw.choice(("cifar.tar.gz", "cifar.tgz")) if kind != "plain" else "cifar.tar"
        files[name] = whole if kind == "plain" else packed
        return f"{kind} {words}"

    def read(self, case: Case) -> None:
        archive = next((name for name in case.files if name.startswith("cifar.t")), None)
        read_source(case.place / archive if archive else case.place)
        if (case.place / "hostile").exists() or Path("hostile").exists():
            raise oracle.Wrong("a pickle ran a program")
