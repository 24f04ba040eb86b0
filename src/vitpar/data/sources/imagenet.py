"""ImageNet as published for ILSVRC2012 (Russakovsky et al. 2015).

It consists of a tar file with one tar file per class, a tar file of validation images, and the development kit with
their labels.
"""

import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitpar.data.sources.source import Progress, Source, SourceSplit, read_span, unpacked, using
from vitpar.data.tar import members, open_tar
from vitpar.errors import DataError
from vitpar.text import shown

TRAIN, VAL, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_TABLE, _TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"
_SYNSET = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")
_Images = list[tuple[str, int, int]]
"""Images in an archive: the name of each tar member, its byte offset in the archive and its bytes."""


def is_imagenet(folder: Path) -> bool:
    """Return whether `folder` contains one of the archives."""
    return any((folder / name).exists() for name in (TRAIN, VAL, KIT))


def imagenet(folder: Path, progress: Progress | None = None) -> Source:
    """Return the source in `folder`, after locating all images, which takes half a minute for a million.

    Classes are in the order of their WordNet numbers, as in torchvision's and timm's models.

    Raises DataError if an archive is missing, is damaged or does not fit the others.
    """
    missing = [name for name in (TRAIN, VAL, KIT) if not (folder / name).exists()]
    if missing:
        raise DataError(f"'{folder}' has no {' and no '.join(missing)}: put ImageNet's three archives into one folder")
    synsets, truth = _kit(folder / KIT)
    classes = [row["WNID"] for row in synsets]
    splits = {"train": _train(folder / TRAIN, classes, progress), "val": _val(folder / VAL, truth)}
    return Source(classes, splits, [row["words"] for row in synsets])


def _kit(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the synsets that have images, in the order of their WordNet numbers, and each validation image's class."""
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError("ImageNet's archives need SciPy: pip install -e '.[imagenet]'") from None
    files, columns = unpacked(path, (_TABLE, _TRUTH)), {"ILSVRC2012_ID": int, "WNID": str, "words": str}
    with using(f"{_TABLE} and {_TRUTH} in '{path}' cannot be used"):
        table = loadmat(io.BytesIO(files[_TABLE]), variable_names=["synsets"], simplify_cells=True)["synsets"]
        # Rows with children are groups of synsets and have no images.
        kept = (row for row in table if not int(row["num_children"]))
        rows = [{name: kind(row[name]) for name, kind in columns.items()} for row in kept]
        rows.sort(key=lambda row: row["WNID"])
        place = {row["ILSVRC2012_ID"]: label for label, row in enumerate(rows)}
        truth = [place[int(line)] for line in files[_TRUTH].split()]
        if not all(_SYNSET.fullmatch(row["WNID"]) for row in rows) or len({row["WNID"] for row in rows}) < len(rows):
            raise ValueError("its classes lack WordNet IDs or repeat them")
    return rows, truth


def _train(path: Path, classes: Sequence[str], progress: Progress | None) -> SourceSplit:
    by_synset = dict[str, _Images]()
    with open_tar(path) as file:
        for member in members(file):
            synset = member.name.removeprefix("./").removesuffix(".tar")
            if synset not in classes or synset in by_synset or not member.isreg():
                raise tarfile.ReadError(f"'{shown(member.name)}' is not the tar file of a class, or occurs twice")
            by_synset[synset] = _images(file, member.offset_data + member.size)
            if progress:
                progress("reading train", len(by_synset), len(classes))
    empty = next((synset for synset in classes if not by_synset.get(synset)), None)
    if empty is not None:
        raise DataError(f"'{path}' has no images of {empty}: fetch it again")
    labels = np.repeat(np.arange(len(classes)), [len(by_synset[synset]) for synset in classes])
    return _split(path, [image for synset in classes for image in by_synset[synset]], labels)


def _val(path: Path, truth: Sequence[int]) -> SourceSplit:
    with open_tar(path) as file:
        images = _images(file)
    matches = [_VAL_NAME.fullmatch(name) for name, *_ in images]
    numbers = [int(name[1]) if name else 0 for name in matches]
    if sorted(numbers) != list(range(1, len(truth) + 1)):
        raise DataError(
            f"'{path}' does not have the {len(truth):,} images listed in the development kit: fetch both again"
        )
    return _split(path, images, np.array([truth[number - 1] for number in numbers]))


def _images(file: BinaryIO, end: int | None = None) -> _Images:
    """Return the images in a tar file, which begins at the current position and ends at byte `end` of its archive.

    Raises tarfile.ReadError and OSError.
    """
    images: _Images = []
    for member in members(file, end):
        if member.isdir():
            continue
        if not member.isreg() or not member.size:
            raise tarfile.ReadError(f"'{shown(member.name)}' is not a file, or is empty")
        images.append((member.name, member.offset_data, member.size))
    return images


def _split(path: Path, images: _Images, labels: np.ndarray) -> SourceSplit:
    def read(i: int) -> bytes:
        return read_span(path, *images[i][1:])

    return SourceSplit(lambda i: f"{path.name}/{images[i][0]}", labels.astype(np.int32), read)
