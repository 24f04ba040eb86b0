"""Where images to pack come from. `open_source` tells the kinds apart by what lies at the path.

SRC/train/<class>/*.jpg, SRC/val/<class>/*.jpg    a folder for every class of every split
SRC/<class>/*.jpg                                 the same without splits: a part becomes `val`
SRC/train.zip, val.zip, train_map.txt, val_map.txt [, classes.txt]    zipped ImageNet, as Swin and Galvatron use it
digits                                            1,797 handwritten digits of 8×8 pixels that scikit-learn ships
"""

import io
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitpar.data.images import FILE_SUFFIXES
from vitpar.data.order import permutation
from vitpar.errors import DataError

DIGITS = "digits"
VAL_FRACTION = 0.2
MOST_CLASSES = 1_000_000  # where a map file alone says how many there are: a wrong label must not make billions


@dataclass(frozen=True)
class SourceSplit:
    """Labelled images of one split. names: what messages call them. read: the encoded image by number (DataError)."""

    names: Sequence[str]
    labels: NDArray[np.int32]
    read: Callable[[int], bytes]

    def subset(self, indices: NDArray[np.int64]) -> "SourceSplit":
        """The images `indices`, in that order."""
        names = [self.names[i] for i in indices]
        return SourceSplit(names, self.labels[indices], lambda i: self.read(int(indices[i])))


@dataclass(frozen=True)
class Source:
    """Images to pack. classes: their names in label order. splits: by name."""

    classes: Sequence[str]
    splits: dict[str, SourceSplit]


def open_source(location: str | Path, *, val_fraction: float | None = None, seed: int = 0) -> Source:
    """The source at `location`: a folder of one of the kinds above, or the word `digits`.

    val_fraction: which part of every class becomes `val` when the source has no such split, 0.2 if None. Raises
    DataError when there is no such source, when it is damaged, or when it has a `val` split and `val_fraction` asks
    for another.
    """
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise DataError(f"val fraction {val_fraction} is out of range: choose a number between 0 and 1, such as 0.2")
    path = Path(location)
    if str(location) == DIGITS:
        source = _digits()
    elif not path.is_dir():
        raise DataError(
            f"no folder '{location}' to pack: give a folder of images, a folder with train.zip, or `{DIGITS}`"
        )
    elif (path / "train.zip").exists() or (path / "train_map.txt").exists():
        source = _zipped(path)
    elif (path / "train").is_dir():
        source = _class_folders(path, [name for name in ("train", "val") if (path / name).is_dir()])
    else:
        source = _class_folders(path, ["."])
    if "val" not in source.splits:
        return _carve_val(source, VAL_FRACTION if val_fraction is None else val_fraction, seed)
    if val_fraction is not None:
        raise DataError(f"'{location}' has a val split of its own: leave out the val fraction {val_fraction}")
    return source


def _class_folders(folder: Path, splits: list[str]) -> Source:
    classes = sorted(entry.name for entry in os.scandir(folder / splits[0]) if _is_class(entry))
    if not classes:
        raise DataError(
            f"no images to pack in '{folder}': it needs train/<class>/ and val/<class>/, or <class>/, "
            "with images in them, or train.zip, val.zip, train_map.txt and val_map.txt"
        )
    found = {}
    for split in splits:
        unknown = sorted({entry.name for entry in os.scandir(folder / split) if _is_class(entry)} - set(classes))
        if unknown:
            raise DataError(
                f"class folder '{folder / split / unknown[0]}' has no counterpart in '{folder / splits[0]}'"
            )
        paths: list[str] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            images = _image_files(folder / split / name)
            if not images and split == splits[0]:
                raise DataError(f"class folder '{folder / split / name}' holds no images: fill it or remove it")
            paths += images
            labels += [label] * len(images)
        if not paths:
            raise DataError(f"'{folder / split}' holds no images: fill it or remove it")
        found["train" if split == "." else split] = _files(paths, labels)
    return Source(classes, found)


def _is_class(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _image_files(folder: Path) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        images = sorted(name for name in files if name.lower().endswith(FILE_SUFFIXES) and not name.startswith("."))
        found += [os.path.join(parent, name) for name in images]
    return found


def _files(paths: list[str], labels: list[int]) -> SourceSplit:
    def read(i: int) -> bytes:
        try:
            return Path(paths[i]).read_bytes()
        except OSError as error:
            raise DataError(f"cannot read '{paths[i]}': {error.strerror}") from None

    return SourceSplit(paths, np.array(labels, dtype=np.int32), read)


def _zipped(folder: Path) -> Source:
    names = folder / "classes.txt"
    classes = _text(names).split("\n") if names.exists() else None
    if classes is not None:
        classes = [line.strip() for line in classes if line.strip()]
    splits = {}
    for split in ("train", "val"):
        entries, labels = _read_map(folder / f"{split}_map.txt", classes)
        splits[split] = _zip_entries(folder / f"{split}.zip", folder / f"{split}_map.txt", entries, labels)
    if classes is None:
        highest = max(int(split.labels.max()) for split in splits.values())
        classes = [str(label) for label in range(highest + 1)]
    return Source(classes, splits)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def _read_map(path: Path, classes: list[str] | None) -> tuple[list[str], list[int]]:
    """Zip entries and labels of a `path<TAB>label` file."""
    entries: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        entry, tab, text = line.rpartition("\t")
        where = f"line {number} of '{path}'"
        if not tab:
            raise DataError(f"{where} is '{line.strip()[:80]}': expected an image's path, a tab and its label")
        try:
            label = int(text)
        except ValueError:
            raise DataError(f"label '{text.strip()}' in {where} is not an integer") from None
        if not 0 <= label < (MOST_CLASSES if classes is None else len(classes)):
            limit = f"the {len(classes)} classes of classes.txt" if classes is not None else f"0 to {MOST_CLASSES - 1}"
            raise DataError(f"label {label} in {where} is outside {limit}: correct it")
        entries.append(entry)
        labels.append(label)
    if not entries:
        raise DataError(f"'{path}' names no images")
    return entries, labels


def _zip_entries(path: Path, map_path: Path, entries: list[str], labels: list[int]) -> SourceSplit:
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None
    except zipfile.BadZipFile as error:
        raise DataError(f"'{path}' is not a whole zip file ({error})") from None
    known = archive.NameToInfo
    missing = next((entry for entry in entries if entry not in known), None)
    if missing is not None:
        raise DataError(f"'{path}' has no entry '{missing}', which '{map_path.name}' names")

    def read(i: int) -> bytes:
        try:
            return archive.read(known[entries[i]])
        except (OSError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"cannot read entry '{entries[i]}' of '{path}': {error}") from None

    return SourceSplit([f"{path.name}/{entry}" for entry in entries], np.array(labels, dtype=np.int32), read)


def _digits() -> Source:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"the `{DIGITS}` data set needs scikit-learn: pip install 'vitpar[digits]'") from None
    data = load_digits()

    def read(i: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.rint(data.images[i] * (255 / 16)).astype(np.uint8)).save(file, "PNG")  # 0..16 -> 0..255
        return file.getvalue()

    names = [f"{DIGITS}/{i}" for i in range(len(data.target))]
    return Source(
        [str(name) for name in data.target_names], {"train": SourceSplit(names, data.target.astype(np.int32), read)}
    )


def _carve_val(source: Source, fraction: float, seed: int) -> Source:
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
    shuffled = permutation(seed, 0, len(train.labels))
    is_val = np.zeros(len(train.labels), dtype=bool)
    for label, number in enumerate(taken):
        is_val[shuffled[train.labels[shuffled] == label][:number]] = True
    splits = {"train": train.subset(np.flatnonzero(~is_val)), "val": train.subset(np.flatnonzero(is_val))}
    return Source(source.classes, splits)
