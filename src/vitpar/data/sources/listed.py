"""A CSV list of images: a line of names, among them `path` and `label` and perhaps `split`; then a line an image.

Paths are relative to the list's folder. Labels are whole numbers or names of classes.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vitpar.data.sources.source import Source, SourceSplit, numbered, read_file, read_lines
from vitpar.errors import DataError, shown

_SPLITS = ("train", "val", "test")


def listed(path: Path) -> Source:
    """The source that the list at `path` names."""
    folder = path.parent
    reader = csv.DictReader(read_lines(path))
    try:
        names = reader.fieldnames or ()
    except csv.Error as error:
        raise DataError(f"the first line of '{path}' cannot be read: {error}") from None
    missing = [name for name in ("path", "label") if name not in names]
    if missing:
        raise DataError(f"the first line of '{path}' names no column '{missing[0]}': it needs path and label")
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in _lines(reader, path):
        where = f"line {reader.line_num} of '{path}'"
        image, label, split = (row.get(name) or "" for name in ("path", "label", "split"))
        split = split or "train"
        if not image or not label:
            raise DataError(f"{where} has no {'path' if not image else 'label'}")
        if split not in _SPLITS:
            raise DataError(f"split '{shown(split)}' in {where} is none of {', '.join(_SPLITS)}")
        whole = os.path.abspath(folder / image)
        if not Path(whole).is_relative_to(os.path.abspath(folder)):
            raise DataError(f"'{shown(image)}' in {where} leaves the list's folder: put the list above all images")
        rows.setdefault(split, []).append((whole, label))
    if "train" not in rows:
        raise DataError(f"'{path}' names no images to train on")
    classes, number = _classes([label for found in rows.values() for _, label in found])
    return Source(classes, {split: _split(found, number) for split, found in rows.items()})


def _lines(reader: "csv.DictReader[str]", path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from reader
    except csv.Error as error:  # such as a field of more than 131,072 characters
        raise DataError(f"line {reader.line_num + 1} of '{path}' cannot be read: {error}") from None


def _classes(labels: list[str]) -> tuple[list[str], dict[str, int]]:
    """The classes, and the number of each label."""
    try:
        number = {label: int(label) for label in set(labels)}
    except ValueError:
        names = sorted(set(labels))
        return names, {name: place for place, name in enumerate(names)}
    return numbered(sorted(number.values())), number


def _split(rows: list[tuple[str, str]], number: dict[str, int]) -> SourceSplit:
    paths = [path for path, _ in rows]
    labels = [number[label] for _, label in rows]
    return SourceSplit(paths, np.array(labels, dtype=np.int32), lambda i: read_file(paths[i]))
