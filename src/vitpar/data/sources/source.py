"""What a source gives to be packed."""

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.split_names import split_of
from vitpar.errors import DataError, shown
from vitpar.files import open_regular, read_bytes
from vitpar.limits import MAX_CLASSES, MAX_IMAGE_BYTES, MAX_LINE_BYTES, MAX_TEXT_BYTES

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


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, without their ends. Raises DataError."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
                raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes")
            for number in itertools.count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"line {number} of '{path}' has more than {MAX_LINE_BYTES:,} bytes: shorten it")
                if not line:
                    return
                yield line.decode("utf-8-sig" if number == 1 else "utf-8", errors="replace").rstrip("\r\n")
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def read_file(path: str | Path) -> bytes:
    """Return the encoded image in a file. Raises DataError."""
    try:
        return read_bytes(path, MAX_IMAGE_BYTES)
    except OSError as error:
        raise DataError(f"cannot read '{shown(path, len(str(path)))}': {error.strerror}") from None


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
