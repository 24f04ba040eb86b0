"""Zipped ImageNet, as Swin and Galvatron use it: train.zip and val.zip, with maps of `path<TAB>label` lines."""

import struct
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from vitpar.data.sources.source import Source, SourceSplit, numbered, read_lines
from vitpar.errors import DataError, shown
from vitpar.files import open_regular
from vitpar.limits import MAX_CLASSES, MAX_IMAGE_BYTES

_PIECE = 1 << 20


def zipped(folder: Path) -> Source:
    names = folder / "classes.txt"
    classes = [line.strip() for line in read_lines(names) if line.strip()] if names.exists() else None
    splits = {}
    for split in ("train", "val"):
        entries, labels = _read_map(folder / f"{split}_map.txt", classes)
        splits[split] = _zip_entries(folder / f"{split}.zip", folder / f"{split}_map.txt", entries, labels)
    if classes is None:
        classes = numbered([int(split.labels.max()) for split in splits.values()])
    return Source(classes, splits)


def _read_map(path: Path, classes: list[str] | None) -> tuple[list[str], list[int]]:
    """Zip entries and labels of a `path<TAB>label` file."""
    entries: list[str] = []
    labels: list[int] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        entry, tab, text = line.rpartition("\t")
        where = f"line {number} of '{path}'"
        if not tab:
            raise DataError(f"{where} is '{shown(line.strip())}': expected an image's path, a tab and its label")
        try:
            label = int(text)
        except ValueError:
            raise DataError(f"label '{shown(text.strip())}' in {where} is not an integer") from None
        if not 0 <= label < (MAX_CLASSES if classes is None else len(classes)):
            limit = f"the {len(classes)} classes of classes.txt" if classes is not None else f"0 to {MAX_CLASSES - 1}"
            raise DataError(f"label {shown(label)} in {where} is outside {limit}: correct it")
        entries.append(entry)
        labels.append(label)
    if not entries:
        raise DataError(f"'{path}' names no images")
    return entries, labels


def _zip_entries(path: Path, map_path: Path, entries: list[str], labels: list[int]) -> SourceSplit:
    try:
        archive = zipfile.ZipFile(open_regular(path))
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror or error}") from None
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
        raise DataError(f"'{path}' is not a whole zip file ({shown(error)})") from None
    known = archive.NameToInfo
    missing = next((entry for entry in entries if entry not in known), None)
    if missing is not None:
        raise DataError(f"'{path}' has no entry '{shown(missing)}', which '{map_path.name}' names")

    def read(i: int) -> bytes:
        entry = known[entries[i]]
        where = f"entry '{shown(entries[i])}' of '{path}'"
        if entry.file_size > MAX_IMAGE_BYTES:
            raise DataError(f"{where} has {entry.file_size:,} bytes: an image can have {MAX_IMAGE_BYTES:,}")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{where} is compressed by a method other than deflate: zip it again")
        try:
            # A piece at a time: asked for all of it, zipfile unpacks more than the entry says it has.
            with archive.open(entry) as file:
                return b"".join(iter(partial(file.read, _PIECE), b""))
        except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"cannot read {where}: {shown(error)}") from None

    return SourceSplit([f"{path.name}/{entry}" for entry in entries], np.array(labels, dtype=np.int32), read)
