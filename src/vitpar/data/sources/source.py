"""The interface of sources, and the functions they share."""

import errno
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import shuffled
from vitpar.errors import DataError
from vitpar.io import open_regular, read_bytes
from vitpar.limits import MAX_CLASSES, MAX_IMAGE_BYTES, MAX_LINE_BYTES, MAX_TEXT_BYTES
from vitpar.text import shown

SPLITS = ("train", "val", "test")
_SPLIT_WORDS = {**{split: split for split in SPLITS}, "training": "train", "valid": "val", "validation": "val"}

Progress = Callable[[str, int, int], None]
"""Called as (what is done, how much of it so far, how much in all), by one thread at a time."""


@dataclass(frozen=True)
class SourceSplit:
    """Labelled images of one split. names: what messages call them. read: the encoded image by number, from any thread
    (DataError). block: how many neighbours are read with an image, and window: among how many images reading in any
    order is cheap; 0 where it is among all.
    """

    names: Sequence[str]
    labels: NDArray[np.int32]
    read: Callable[[int], bytes]
    block: int = 0
    window: int = 0

    def subset(self, indices: NDArray[np.int64]) -> "SourceSplit":
        """The images `indices`, in that order."""
        names = [self.names[i] for i in indices]
        return SourceSplit(names, self.labels[indices], lambda i: self.read(int(indices[i])), self.block, self.window)


def check_number_of_classes(classes: Sequence[str]) -> None:
    """Raise DataError where there are more classes than a data set can have."""
    if len(classes) > MAX_CLASSES:
        raise DataError(f"there are {len(classes):,} classes: a data set can have {MAX_CLASSES:,}")


@dataclass(frozen=True)
class Source:
    """Images to pack.

    classes: what tells classes apart, in label order. splits: by name. class_names: what people call the classes, where
    that is something else. Raises DataError for too many classes.
    """

    classes: Sequence[str]
    splits: dict[str, SourceSplit]
    class_names: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_number_of_classes(self.classes)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise DataError where the system cannot read the file at `path`."""
    try:
        yield
    except OSError as error:
        name = shown(path, len(str(path)))  # its end, if it is long
        raise DataError(f"cannot read '{name}': {error.strerror or error}") from None


def read_file(path: str | Path, limit: int = MAX_IMAGE_BYTES) -> bytes:
    """Return the content of a file of at most `limit` bytes. Raises DataError."""
    with reading(path):
        return read_bytes(path, limit)


def read_span(path: Path, begin: int, size: int) -> bytes:
    """Return `size` bytes of a file from the byte `begin`. Raises DataError, also where it ends before."""
    with reading(path), open_regular(path) as file:
        data = os.pread(file.fileno(), size, begin)
    if len(data) != size:
        raise DataError(f"'{path}' has shrunk since it was opened: fetch it again")
    return data


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, without their ends. Raises DataError."""
    with reading(path), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes")
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise DataError(f"line {number} of '{path}' has more than {MAX_LINE_BYTES:,} bytes: shorten it")
            if not line:
                return
            yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace").rstrip("\r\n")


def split_of(name: str) -> str | None:
    """`train`, `val` or `test`, as in ``imagenet-validation-00012-of-00128.tar``; None for none of them."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def by_split(paths: Iterable[Path]) -> dict[str, list[Path]]:
    """Files by the splits that their names tell; all of `train` where none does (DataError where only some do)."""
    found: dict[str, list[Path]] = {}
    unknown: list[Path] = []
    for path in sorted(paths):
        split = split_of(path.name)
        (unknown if split is None else found.setdefault(split, [])).append(path)
    if unknown and found:
        raise DataError(f"'{unknown[0]}' does not say which split it is of, as other files do: rename or remove it")
    return found or {"train": unknown}


def numbered(labels: Sequence[int]) -> list[str]:
    """Names of classes that have none (DataError for a label that cannot be one)."""
    wrong = next((label for label in labels if not 0 <= label < MAX_CLASSES), None)
    if wrong is not None:
        raise DataError(f"label {shown(wrong)} is outside 0 to {MAX_CLASSES - 1}: correct it")
    return [str(label) for label in range(max(labels) + 1)]


def carve_val(source: Source, fraction: float, seed: int) -> Source:
    """Move ⌈fraction × samples⌉ of `train` into `val`, as nearly the same part of every class as can be."""
    train = source.splits["train"]
    counts = np.bincount(train.labels, minlength=len(source.classes))
    total = math.ceil(fraction * len(train.labels) - 1e-9)
    exact = counts * fraction
    taken = np.floor(exact).astype(int)
    for label in np.argsort(taken - exact, kind="stable"):  # the largest remainder first
        if taken.sum() < total and taken[label] < counts[label] - 1:  # every class keeps an image to train on
            taken[label] += 1
    if not taken.any():
        raise DataError(
            f"{len(train.labels)} images in {len(source.classes)} classes are too few to carve a val split out of, "
            "since every class keeps one to train on: add images or a val/ folder"
        )
    order = shuffled(np.arange(len(train.labels)), len(train.labels), seed)
    is_val = np.zeros(len(train.labels), dtype=bool)
    by_class = order[np.argsort(train.labels[order], kind="stable")]
    begins = np.cumsum(counts) - counts
    for begin, number in zip(begins, taken, strict=True):
        is_val[by_class[begin : begin + number]] = True
    splits = {"train": train.subset(np.flatnonzero(~is_val)), "val": train.subset(np.flatnonzero(is_val))}
    return Source(source.classes, splits)
