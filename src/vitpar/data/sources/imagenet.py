"""ImageNet as published for ILSVRC2012 (Russakovsky et al. 2015).

It consists of a tar file with one tar file per class, a tar file of validation images, and the development kit with
their labels.
"""

import io
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitpar.data.sources.source import Progress, Source, SourceSplit, read_span
from vitpar.data.tar import Readable, members, open_tar, unpacked
from vitpar.errors import DataError
from vitpar.limits import MAX_CLASSES
from vitpar.text import shown

TRAIN, VAL, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_TABLE, _TRUTH = "meta.mat", "ILSVRC2012_validation_ground_truth.txt"
_SYNSET = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"(?:.*/)?ILSVRC2012_val_(\d{8})\.JPEG")


@dataclass(frozen=True)
class _Images:
    """Images in an archive."""

    names: list[str]
    """Names of the tar members."""
    spans: np.ndarray
    """Byte offset in the archive and size in bytes of each image, int64 [images, 2]."""


@dataclass(frozen=True)
class _Kit:
    """Content of the development kit."""

    classes: Sequence[str]
    """WordNet numbers of the synsets that have images, sorted."""
    names: Sequence[str]
    """Names of the classes, in the same order."""
    truth: Sequence[int]
    """Class of every validation image, as an index into `classes`."""


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
    kit = _kit(folder / KIT)
    splits = {"train": _train(folder / TRAIN, kit.classes, progress), "val": _val(folder / VAL, kit.truth)}
    return Source(kit.classes, splits, kit.names)


def _kit(path: Path) -> _Kit:
    files = unpacked(path, (_TABLE, _TRUTH))
    missing = next((name for name in (_TABLE, _TRUTH) if name not in files), None)
    if missing is not None:
        raise DataError(f"'{path}' has no {missing}: fetch it again")
    try:
        rows = _synsets(files[_TABLE])
        # Rows with children are groups of synsets and have no images.
        known = sorted((row for row in rows if not row["num_children"]), key=lambda row: row["WNID"])
        classes = [row["WNID"] for row in known]
        wrong = next((synset for synset in classes if not _SYNSET.fullmatch(synset)), None)
        if wrong is not None or len(set(classes)) < len(classes) or not 0 < len(classes) <= MAX_CLASSES:
            raise ValueError("its classes lack WordNet IDs or repeat them")
    except ValueError as error:
        raise DataError(f"{_TABLE} in '{path}' cannot be used ({shown(error)}): fetch it again") from None
    place = {row["ILSVRC2012_ID"]: label for label, row in enumerate(known)}
    try:
        truth = [place[int(line)] for line in files[_TRUTH].split()]
    except (ValueError, KeyError):
        raise DataError(f"{_TRUTH} in '{path}' has a line that is not a class of {_TABLE}: fetch it again") from None
    return _Kit(classes, [row["words"] for row in known], truth)


def _synsets(table: bytes) -> list[dict[str, Any]]:
    """Return the rows of the table of synsets, by the names of its columns.

    Raises ValueError for another kind of file, a damaged one, and one without this table.
    """
    try:
        from scipy.io import loadmat
    except ImportError:
        raise DataError("ImageNet's archives need SciPy: pip install -e '.[imagenet]'") from None
    columns = {"ILSVRC2012_ID": int, "WNID": str, "words": str, "num_children": int}
    try:
        rows = np.atleast_1d(loadmat(io.BytesIO(table), variable_names=["synsets"], simplify_cells=True)["synsets"])
        return [{name: kind(row[name]) for name, kind in columns.items()} for row in rows]
    except Exception as error:  # damaged bytes make it raise nearly anything
        raise ValueError(f"its table of synsets cannot be read: {error}") from error


def _train(path: Path, classes: Sequence[str], progress: Progress | None) -> SourceSplit:
    known, by_synset = set(classes), dict[str, _Images]()
    with open_tar(path) as file:
        for member in members(file):
            synset = member.name.removeprefix("./").removesuffix(".tar")
            if synset not in known or synset in by_synset or not member.isreg():
                raise tarfile.ReadError(f"'{shown(member.name)}' is not the tar file of a class, or occurs twice")
            by_synset[synset] = _images(_Part(file, file.tell(), member.size), file.tell())
            if progress:
                progress("reading train", len(by_synset), len(classes))
    empty = next((synset for synset in classes if synset not in by_synset or not by_synset[synset].names), None)
    if empty is not None:
        raise DataError(f"'{path}' has no images of {empty}: fetch it again")
    images = [by_synset[synset] for synset in classes]
    names = [name for one in images for name in one.names]
    labels = np.repeat(np.arange(len(classes)), [len(one.names) for one in images])
    return _split(path, _Images(names, np.concatenate([one.spans for one in images])), labels)


def _val(path: Path, truth: Sequence[int]) -> SourceSplit:
    with open_tar(path) as file:
        images = _images(file)
    matches = [_VAL_NAME.fullmatch(name) for name in images.names]
    numbers = [int(name[1]) if name else 0 for name in matches]
    if sorted(numbers) != list(range(1, len(truth) + 1)):
        raise DataError(
            f"'{path}' does not have the {len(truth):,} images listed in the development kit: fetch both again"
        )
    return _split(path, images, np.array([truth[number - 1] for number in numbers]))


class _Part:
    """File-like view of a part of a file.

    begin: byte offset of the part.
    size: bytes of the part.
    """

    def __init__(self, file: BinaryIO, begin: int, size: int) -> None:
        self._file, self._begin, self._size, self._place = file, begin, size, 0

    def read(self, size: int, /) -> bytes:
        self._file.seek(self._begin + self._place)
        data = self._file.read(max(0, min(size, self._size - self._place)))
        self._place += len(data)
        return data

    def seek(self, place: int, /) -> int:
        self._place = place
        return place

    def tell(self) -> int:
        return self._place


def _images(file: Readable, begin: int = 0) -> _Images:
    """Return the images in a tar file.

    begin: byte offset of the tar file in its archive.

    Raises tarfile.ReadError and OSError.
    """
    names, spans = list[str](), list[tuple[int, int]]()
    for member in members(file):
        if member.isdir():
            continue
        if not member.isreg() or not member.size:
            raise tarfile.ReadError(f"'{shown(member.name)}' is not a file, or is empty")
        names.append(member.name)
        spans.append((begin + member.offset_data, member.size))
    return _Images(names, np.array(spans, np.int64).reshape(-1, 2))


def _split(path: Path, images: _Images, labels: np.ndarray) -> SourceSplit:
    def read(i: int) -> bytes:
        return read_span(path, *images.spans[i].tolist())

    return SourceSplit([f"{path.name}/{name}" for name in images.names], labels.astype(np.int32), read)
