"""Interface of sources, and functions that they share."""

import gzip
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpar.data.classes import check_class_names, class_names
from vitpar.data.randomness import shuffled
from vitpar.data.tar import content, members
from vitpar.errors import DataError
from vitpar.io import decode_utf8, open_regular, read_bytes
from vitpar.limits import MAX_CLASSES, MAX_JSON_BYTES
from vitpar.text import count, shown

SPLITS = ("train", "val", "test")
"""Names of the splits that a source may have."""
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "eval", "evaluation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Split that each name of a folder, of a value in a list, or part of a file name stands for, in lower case."""

CLASSES_SHOWN = 5
"""Most classes that `Source.describe` names."""
Progress = Callable[[str, int, int], None]
"""Callback (description of the work, number done, total number), called by one thread at a time."""


@dataclass(frozen=True)
class SourceSplit:
    """Labelled images of one split of a source."""

    name: Callable[[int], str]
    """Function from the number of an image to its name, for messages."""
    labels: NDArray[np.int32]
    """Class number of each image, int32 [samples]."""
    read: Callable[[int], bytes]
    """Function from the number of an image to its encoded bytes, callable from any thread.

    Raises DataError.
    """
    block: int = 0
    """Largest number of neighbouring images that are read together; 0 if images are read one by one."""
    window: int = 0
    """Number of images within which reading in any order is cheap; 0 if any order of all images is cheap."""
    origin: str = ""
    """Where the images are from, such as the folder or file; empty for the source itself."""

    def subset(self, indices: NDArray[np.int64]) -> "SourceSplit":
        """Return the split that consists of the images `indices`, in that order."""
        name, read = (lambda i, part=part: part(int(indices[i])) for part in (self.name, self.read))
        return replace(self, name=name, labels=self.labels[indices], read=read)


@dataclass(frozen=True)
class Source:
    """Source of images to pack. Raises DataError as `check_class_names` does."""

    classes: Sequence[str]
    """Identifiers of the classes, in label order."""
    splits: dict[str, SourceSplit]
    """Splits by name."""
    class_names: Sequence[str] | None = None
    """Human-readable names of the classes, in the same order; None if they do not differ."""
    left_out: Sequence[str] = ()
    """Parts of the source that are not used and why, a sentence each."""

    def __post_init__(self) -> None:
        check_class_names(self.classes)
        check_class_names([*dict.fromkeys(self.class_names or ())])  # ImageNet has two cranes

    def describe(self, location: str) -> list[str]:
        """Return lines on what was found at `location`: splits and their origin, classes, and what is left out."""
        names = [shown(name) for name in self.class_names or self.classes]
        listed = ", ".join(names[:CLASSES_SHOWN]) + ", …" * (len(names) > CLASSES_SHOWN)
        lines = [f"{shown(location)}: {count(len(names), 'class')}: {listed}"]
        for name, split in self.splits.items():
            origin = f" from {shown(split.origin)}" * bool(split.origin)
            lines.append(f"  {name}: {len(split.labels):,} images{origin}")
        if "val" not in self.splits:
            lines.append("  no val split: runs do not evaluate")
        return lines + [f"  left out: {sentence}" for sentence in self.left_out]


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert an OSError, or text that is not UTF-8, within the context to a DataError that names `path`."""
    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError) as error:
        name = shown(path, len(str(path)))  # shows the end of a long path
        why = error.strerror if isinstance(error, OSError) else None
        raise DataError(f"cannot read '{name}': {why or error}") from None


@contextmanager
def using(words: str, remedy: str = "fetch it again") -> Iterator[None]:
    """Convert any error within the context to a DataError: damaged files make libraries raise nearly anything.

    Panics of libraries in Rust are no Exceptions.

    words: beginning of the message, such as "'x.zip' is not a valid zip file".
    """
    try:
        yield
    except (DataError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        why = getattr(error, "strerror", None) or shown(error) or type(error).__name__
        raise DataError(f"{words} ({shown(why)}): {remedy}") from None


def parquet_library() -> Any:
    """Return pyarrow.parquet. Raises DataError if it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise DataError("Parquet files need pyarrow: pip install -e '.[parquet]'") from None
    return parquet


def read_file(path: str | Path) -> bytes:
    """Return the content of a file, which may be a web page: those can be skipped. Raises DataError."""
    with reading(path), open_regular(path, pages=True) as file:
        return file.read()


def read_span(path: Path, begin: int, size: int) -> bytes:
    """Return `size` bytes of a file from byte offset `begin`. Raises DataError, also if the file ends before."""
    with reading(path), open_regular(path) as file:
        data = os.pread(file.fileno(), size, begin)
    if len(data) != size:
        raise DataError(f"'{path}' has shrunk since it was opened: fetch it again")
    return data


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, without line ends.

    Raises DataError, also for a file in another encoding.
    """
    with reading(path), open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            yield decode_utf8(line, number).rstrip("\r\n")


def read_class_names(path: Path) -> list[str]:
    """Return the names of classes in a text file, one a line. Raises DataError."""
    with reading(path):
        return class_names(read_bytes(path, MAX_JSON_BYTES))


def unpacked(path: Path, names: Container[str]) -> dict[str, bytes]:
    """Return the contents of the files `names` in a tar archive, by name.

    The files may be in any folder of the archive; files that it lacks are left out.

    path: the archive; compressed by gzip unless its name ends with ".tar".

    Raises DataError for a damaged archive.
    """
    contents: dict[str, bytes] = {}
    with using(f"'{path}' is not a valid tar file"), open_regular(path) as packed:
        file = packed if path.name.endswith(".tar") else gzip.GzipFile(fileobj=packed)
        for member in members(file):
            name = PurePosixPath(member.name).name
            if member.isreg() and name in names:
                contents[name] = content(file, member)
    return contents


def whole_number(text: str) -> int | None:
    """Return the number that a label consists of; None for a name, such as 1_0 or thousands of digits."""
    return int(text) if re.fullmatch(r"\s*[-+]?[0-9]{1,4000}\s*", text) else None


def split_of(name: str) -> str | None:
    """Return the split that a file name contains: `train`, `val` or `test`; None if it contains none of them.

    For example, ``imagenet-validation-00012-of-00128.tar`` belongs to `val`.
    """
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), None)


def by_split(paths: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Group files by the split in their names, or else in that of their folder below `root`; all are `train` without.

    Raises DataError if only some names contain one.
    """
    splits: dict[str, list[Path]] = {}
    unknown: list[Path] = []
    for path in sorted(paths):
        split = split_of(path.name) or (split_of(path.parent.name) if path.parent != root else None)
        (unknown if split is None else splits.setdefault(split, [])).append(path)
    if unknown and splits:
        raise DataError(f"'{unknown[0]}' lacks a split in its name, unlike other files: rename or remove it")
    return splits or {"train": unknown}


def numbered(labels: Sequence[int]) -> list[str]:
    """Return numbers as names of classes that have no names: "0" to the largest of `labels`.

    Raises DataError for a label that is negative or too large.
    """
    wrong = next((label for label in labels if not 0 <= label < MAX_CLASSES), None)
    if wrong is not None:
        raise DataError(f"label {shown(wrong)} is outside 0 to {MAX_CLASSES - 1}: correct it")
    return [str(label) for label in range(max(labels) + 1)]


def carve_val(source: Source, fraction: float, seed: int) -> Source:
    """Move ⌈fraction × samples⌉ images of `train` into `val`, as nearly the same fraction of every class as possible.

    Other splits and the names of the classes stay. Every class keeps at least one image in `train`.

    Raises DataError if there are too few images.
    """
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
            f"{len(train.labels)} images in {len(source.classes)} classes are too few for a val split, "
            "since each class keeps one for training: add images or a val/ folder"
        )
    order = shuffled(np.arange(len(train.labels)), len(train.labels), seed)
    is_val = np.zeros(len(train.labels), dtype=bool)
    by_class = order[np.argsort(train.labels[order], kind="stable")]
    begins = np.cumsum(counts) - counts
    for begin, number in zip(begins, taken, strict=True):
        is_val[by_class[begin : begin + number]] = True
    origin = f"{fraction:.0%} of each class of train, since there is no val split".replace("%", " %", 1)
    val = replace(train.subset(np.flatnonzero(is_val)), origin=origin)
    return replace(source, splits=source.splits | {"train": train.subset(np.flatnonzero(~is_val)), "val": val})
