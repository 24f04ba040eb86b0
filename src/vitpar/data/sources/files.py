"""Sources of image files: class folders, CSV lists, and zip files in the layout of Swin and Galvatron.

The first line of a list names its columns, which include `path`, `label` and optionally `split`; every other line
describes an image. Paths are relative to the list's folder. Labels are integers or class names. The zip files train.zip
and val.zip come with maps, which are files of `path<TAB>label` lines.
"""

import csv
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitpar.data.images import FILE_SUFFIXES
from vitpar.data.sources.source import (
    SPLIT_WORDS,
    SPLITS,
    Source,
    SourceSplit,
    numbered,
    read_class_names,
    read_file,
    read_lines,
    reading,
    using,
    whole_number,
)
from vitpar.errors import DataError
from vitpar.io import open_regular
from vitpar.limits import MAX_CLASSES
from vitpar.text import either, shown


def split_folders(folder: Path) -> dict[str, Path]:
    """Return the folders of splits in `folder` by split; empty if `folder` has class folders itself.

    A name counts in any case, as in SPLIT_WORDS. One folder called train, without folders in it, is a class.

    Raises DataError for two folders of the same split, and for other splits without train.
    """
    folders: dict[str, Path] = {}
    others = 0
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not _is_class(entry):
            continue
        split, path = SPLIT_WORDS.get(entry.name.lower()), folder / entry.name
        if split is None:
            others += 1
        elif split in folders:
            raise DataError(f"'{folders[split]}' and '{path}' are both the {split} split: keep one")
        else:
            folders[split] = path
    if "train" in folders:
        alone = len(folders) == 1 and not any(map(_is_class, os.scandir(folders["train"])))
        return {} if alone else {split: folders[split] for split in SPLITS if split in folders}
    if folders and not others:
        raise DataError(f"'{folder}' has {', '.join(folders)} but no training split: add a folder train")
    return {}


def class_folders(folder: Path, splits: dict[str, Path]) -> Source:
    """Return the source in `folder`, with a folder for every class in the folder of every split.

    splits: folders of the splits; empty for a `folder` without splits.

    A test split without labels is left out. Raises DataError.
    """
    left_out = [
        f"'{folder / name}': it is neither train, val nor test"
        for name in _classes_in(folder)
        if splits and folder / name not in splits.values()
    ]
    splits = splits or {"train": folder}
    train = splits["train"]
    classes = _classes_in(train)
    if not classes:
        raise DataError(
            f"'{train}' has no class folders: sort images into {train.name}/<class>/, list them in a CSV file with the "
            "columns path, label and split, or give train.zip, val.zip, train_map.txt and val_map.txt"
        )
    source_splits = {}
    for split, place in splits.items():
        origin = "" if place == folder else f"{place.name}/"
        annotations = place / f"{place.name}_annotations.txt"
        if split != "train" and annotations.is_file():
            source_splits[split] = replace(_annotated(annotations, classes), origin=f"{origin} and {annotations.name}")
            continue
        named = _classes_in(place)
        unknown, unlabelled = sorted({*named} - {*classes}), not {*named} & {*classes} and bool(image_files(place))
        if split == "test" and unlabelled:
            left_out.append(f"'{place}': its images are not in class folders, so they have no labels")
            continue
        if unknown:
            raise DataError(f"class folder '{place / unknown[0]}' has no counterpart in '{train}'")
        if unlabelled:
            raise DataError(
                f"'{place}' has images but no class folders: sort them into {place.name}/<class>/, or remove it"
            )
        images = {name: image_files(place / name) for name in classes}
        empty = next((place / name for name in classes if not images[name] and split == "train"), None)
        if empty is not None or not any(images.values()):
            raise DataError(f"'{empty or place}' holds no images: fill it or remove it")
        paths = [path for found in images.values() for path in found]
        labels = [label for label, found in enumerate(images.values()) for _ in found]
        source_splits[split] = replace(_split(paths, labels), origin=origin)
    return Source(classes, source_splits, left_out=left_out)


def _classes_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))


def _annotated(path: Path, classes: list[str]) -> SourceSplit:
    """Return the split whose images and classes are the first two columns of a file, as in Tiny ImageNet's val.

    Images are in the file's folder, or in `images` in it.
    """
    number, inside = {name: label for label, name in enumerate(classes)}, path.parent / "images"
    folder = inside if inside.is_dir() else path.parent
    images, labels = _tabbed(path, lambda label: number.get(label), "a class of train")
    if (outside := next((image for image in images if Path(image).name != image), None)) is not None:
        raise DataError(f"'{path}' names '{shown(outside)}', which is not a file in '{folder}': correct it")
    return _split([str(folder / image) for image in images], labels)


def _tabbed(path: Path, number: Callable[[str], int | None], kind: str) -> tuple[list[str], list[int]]:
    """Return the images and labels in a file of `image<TAB>label` lines; further columns do not count.

    number: returns the number of a label; None for a wrong one.
    kind: what labels are, for messages.

    Raises DataError.
    """
    images: list[str] = []
    labels: list[int] = []
    for line, text in enumerate(read_lines(path), start=1):
        if not text.strip():
            continue
        image, word, *_ = (*text.split("\t"), "")
        if not image or (label := number(word)) is None:
            raise DataError(f"line {line} of '{path}' is '{shown(text)}': it needs an image, a tab, and {kind}")
        images.append(image)
        labels.append(label)
    if not images:
        raise DataError(f"'{path}' lists no images: fill it")
    return images, labels


def _is_class(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir() and not entry.name.startswith((".", "__MACOSX"))


def image_files(folder: Path) -> list[str]:
    paths = []
    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        place = os.stat(parent)
        if (place.st_dev, place.st_ino) in seen:  # seen before through a link; links may form cycles
            folders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        folders.sort()
        images = sorted(name for name in files if name.lower().endswith(FILE_SUFFIXES) and not name.startswith("."))
        paths += [os.path.join(parent, name) for name in images]
    return paths


def _split(paths: list[str], labels: list[int]) -> SourceSplit:
    return SourceSplit(paths.__getitem__, np.array(labels, dtype=np.int32), lambda i: read_file(paths[i]))


def listed(path: Path) -> Source:
    """Return the source that the CSV list at `path` describes. Raises DataError."""
    folder = path.parent
    reader = csv.DictReader(read_lines(path))
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in _rows(reader, path):
        where = f"line {reader.line_num} of '{path}'"
        image, label, split = (row.get(name) or "" for name in ("path", "label", "split"))
        if not image or not label.strip():
            raise DataError(f"{where} has no {'path' if not image else 'label'}")
        named, split = split, SPLIT_WORDS.get(split.strip().lower() or "train", "")
        if not split:
            raise DataError(f"unknown split '{shown(named)}' in {where}: use {either(SPLITS)}")
        whole = os.path.abspath(folder / image)
        if not Path(whole).is_relative_to(os.path.abspath(folder)):
            raise DataError(f"'{shown(image)}' in {where} is outside the list's folder: move the list above all images")
        rows.setdefault(split, []).append((whole, label))
    if "train" not in rows:
        raise DataError(f"'{path}' lists no training images")
    words = sorted({word for pairs in rows.values() for _, word in pairs})
    number = {word: value for word in words if (value := whole_number(word)) is not None}
    if len(number) == len(words):
        classes = numbered(sorted(number.values()))
    else:
        classes, number = words, {word: place for place, word in enumerate(words)}
    splits = {
        split: _split([image for image, _ in pairs], [number[label] for _, label in pairs])
        for split, pairs in rows.items()
    }
    return Source(classes, splits)


def _rows(reader: "csv.DictReader[str]", path: Path) -> Iterator[dict[str, str]]:
    try:
        missing = next((name for name in ("path", "label") if name not in (reader.fieldnames or ())), None)
        if missing is not None:
            raise DataError(f"the first line of '{path}' lacks the column '{missing}': it needs path and label")
        yield from reader
    except csv.Error as error:  # such as a field of more than 131,072 characters
        raise DataError(f"line {reader.line_num + 1} of '{path}' cannot be read: {error}") from None


def zipped(folder: Path) -> Source:
    """Return the source in `folder`, which contains zip files and their maps. Raises DataError."""
    names = folder / "classes.txt"
    classes = read_class_names(names) if names.exists() else None
    limit = MAX_CLASSES if classes is None else len(classes)

    def number(word: str) -> int | None:
        label = whole_number(word)
        return label if label is not None and 0 <= label < limit else None

    splits = {}
    for split in ("train", "val"):
        entries, labels = _tabbed(folder / f"{split}_map.txt", number, f"a label from 0 to {limit - 1}")
        splits[split] = _zip_entries(folder / f"{split}.zip", folder / f"{split}_map.txt", entries, labels)
    return Source(classes or numbered([int(split.labels.max()) for split in splits.values()]), splits)


def _zip_entries(path: Path, map_path: Path, entries: list[str], labels: list[int]) -> SourceSplit:
    with reading(path):
        file = open_regular(path)
    with using(f"'{path}' is not a valid zip file"):
        archive = zipfile.ZipFile(file)
    known = archive.NameToInfo
    missing = next((entry for entry in entries if entry not in known), None)
    if missing is not None:
        raise DataError(f"'{path}' has no entry '{shown(missing)}', which '{map_path.name}' lists")

    def read(i: int) -> bytes:
        entry, where = known[entries[i]], f"entry '{shown(entries[i])}' of '{path}'"
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{where} is compressed by a method other than deflate: zip it again")
        with using(f"cannot read {where}"):
            return archive.read(entry)

    return SourceSplit(lambda i: f"{path.name}/{entries[i]}", np.array(labels, dtype=np.int32), read)
