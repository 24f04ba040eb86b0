"""A folder for every class."""

import os
from pathlib import Path

import numpy as np

from vitpar.data.images import FILE_SUFFIXES
from vitpar.data.sources.source import Source, SourceSplit, read_file
from vitpar.errors import DataError


def class_folders(folder: Path, splits: list[str]) -> Source:
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
        found["train" if split == "." else split] = files(paths, labels)
    return Source(classes, found)


def _is_class(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _image_files(folder: Path) -> list[str]:
    found = []
    seen = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        place = os.stat(parent)
        if (place.st_dev, place.st_ino) in seen:  # by a link: there may be rings of them
            folders.clear()
            continue
        seen.add((place.st_dev, place.st_ino))
        folders.sort()
        images = sorted(name for name in files if name.lower().endswith(FILE_SUFFIXES) and not name.startswith("."))
        found += [os.path.join(parent, name) for name in images]
    return found


def files(paths: list[str], labels: list[int]) -> SourceSplit:
    return SourceSplit(paths, np.array(labels, dtype=np.int32), lambda i: read_file(paths[i]))
