"""Hugging Face's image data sets in Parquet files with a column of encoded images and one of class labels."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.sources.source import Names, Source, SourceSplit, by_split, numbered, split_of
from vitpar.errors import DataError
from vitpar.io import open_regular, parse_json
from vitpar.limits import MAX_HEADER_BYTES, MAX_IMAGE_BYTES, MAX_RECORD_BYTES, MAX_ROWS
from vitpar.text import either, shown

_IMAGES = ("image", "img")
_MISSING = -1  # label of a row without one
_BATCH = 16  # most rows that are read at a time
_KEPT, _KEPT_BYTES = 64, 1 << 30  # limits of the cache of row groups: their number and their bytes
_SMALL = 1 << 26  # bytes of a row group that any file may have, and a quarter of those that the cache may
_EXPANSION = 4  # limit of a row group, and of the cache, in units of the bytes of the files: images do not compress


def parquet(folder: Path) -> Source:
    """Return the source in the files that `parquet_files` finds.

    Names of files such as ``train-00000-of-00002.parquet``, or else of their folders, tell the splits.

    Raises DataError, also if pyarrow is not installed.
    """
    try:
        import pyarrow.parquet as library
    except ImportError:
        raise DataError("Parquet files need pyarrow: pip install -e '.[parquet]'") from None
    paths = by_split(parquet_files(folder), folder)
    tables = {split: [_File(path, library) for path in files] for split, files in paths.items()}
    # Contests keep the labels of their test split secret and publish negative ones, or none.
    left_out = []
    if "test" in tables and all((file.labels < 0).all() for file in tables["test"]):
        left_out = [f"'{tables.pop('test')[0].path}' and other files of test: they have no labels"]
    files = [file for group in tables.values() for file in group]
    named = next((file.classes for file in files if file.classes), None)
    labels = {split: np.concatenate([file.labels for file in group]) for split, group in tables.items()}
    for split, numbers in labels.items():
        if len(missing := np.flatnonzero(numbers == _MISSING)):
            raise DataError(
                f"{len(missing):,} rows of '{split}' in '{folder}' have no label (null or -1), the first is row "
                f"{missing[0]}: remove or label them"
            )
    classes = named or numbered([int(label) for split in labels.values() for label in np.unique(split)])
    for split, numbers in labels.items():
        wrong = numbers[(numbers < 0) | (numbers >= len(classes))]
        if len(wrong):
            raise DataError(f"label {wrong[0]} of '{split}' in '{folder}' is outside the {len(classes)} classes")
    return Source(classes, {split: _split(tables[split], labels[split]) for split in tables}, left_out=left_out)


def parquet_files(folder: Path) -> list[Path]:
    """Return the Parquet files in `folder`, or else in its folder `data` or in that of its only configuration.

    The hub's data sets have `CONFIGURATION/train-00000-of-00001.parquet`, and converted ones
    `CONFIGURATION/train/0000.parquet`.

    Raises DataError for several configurations.
    """
    for pattern in ("*.parquet", "data/*.parquet"):
        if matching := sorted(folder.glob(pattern)):
            return matching
    matching = sorted(path for depth in ("*/*", "*/*/*") for path in folder.glob(f"{depth}.parquet"))
    places = list(dict.fromkeys(folder / path.relative_to(folder).parts[0] for path in matching))
    if len(places) > 1 and any(split_of(place.name) is None for place in places):
        raise DataError(f"'{folder}' has Parquet files in {either(place.name for place in places)}: name one of them")
    return matching


class _File:
    """Parquet file of images, opened for reading its row groups.

    image: name of the column of images.
    column: name of the column of their bytes.
    labels: label of each row, int64 [rows].
    classes: names of the classes; None if the file does not name them.
    starts: first row of each row group, and then the number of rows.
    group_bytes: uncompressed size of the largest row group.
    size: bytes of the file.
    """

    def __init__(self, path: Path, library: Any) -> None:
        from pyarrow import types

        self.path = path
        try:
            self.size = checked_size(path)
            self._most = min(MAX_RECORD_BYTES, max(_SMALL, _EXPANSION * self.size))
            schema = library.read_schema(path)
            self.image = next((f.name for f in schema if f.name in _IMAGES and _has_bytes(f.type)), None)
            named = ("label", "labels", "fine_label")
            label = next((f.name for f in schema if f.name in named and types.is_integer(f.type)), None)
            if self.image is None or label is None:
                raise DataError(
                    f"'{path}' has the columns {shown(', '.join(schema.names))}: it needs `image` (bytes) and "
                    "`label` (integers)"
                )
            self.column = self.image if _is_binary(schema.field(self.image).type) else f"{self.image}.bytes"
            self._library, self._meta = library, library.read_metadata(path)
            meta = self._meta
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            self.group_bytes = max((group.total_byte_size for group in groups), default=0)
            if meta.num_rows > MAX_ROWS or self.group_bytes > self._most:
                raise DataError(
                    f"'{path}' has {meta.num_rows:,} rows, and {self.group_bytes:,} bytes in a row group: write "
                    f"files of at most {MAX_ROWS:,} rows, in row groups of at most {self._most:,} bytes, as with "
                    "row_group_size=100"
                )
            with library.ParquetFile(path, metadata=meta) as file:
                column = file.read([label])[label]
                self.labels = np.asarray(column.fill_null(_MISSING).to_numpy(), dtype=np.int64)
            self.classes = _classes(schema.metadata or {}, label)
            self.starts = [0, *accumulate(group.num_rows for group in groups)]
        except DataError:
            raise
        except Exception as error:  # damaged files make pyarrow raise nearly anything
            raise DataError(f"'{path}' cannot be read as Parquet ({shown(error)}): fetch it again") from None

    def group(self, number: int) -> Any:
        """Return the images of row group `number`: a pyarrow.ChunkedArray of bytes, or of structs with a field `bytes`.

        Raises DataError.
        """
        from pyarrow import Table

        pieces, size = [], 0
        try:
            # Read a few rows at a time and count their bytes: the file may store a repeated image once, while memory
            # holds every copy. No image is larger than what the group stores.
            stored = self._meta.row_group(number).total_byte_size
            rows = min(_BATCH, max(1, self._most // 4 // max(1, stored)))
            with self._library.ParquetFile(self.path, metadata=self._meta) as file:  # closed: there may be many
                for piece in file.iter_batches(rows, row_groups=[number], columns=[self.column]):
                    size += piece.nbytes
                    if size > self._most:
                        raise DataError(f"a row group of '{self.path}' has more than {self._most:,} bytes")
                    pieces.append(piece)
            return Table.from_batches(pieces)[self.image]
        except DataError:
            raise
        except Exception as error:  # damaged files make pyarrow raise nearly anything
            raise DataError(f"'{self.path}' cannot be read ({shown(error)}): fetch it again") from None


def checked_size(path: Path) -> int:
    """Return the bytes of a Parquet file, after checking that its end, with its schema and metadata, is not long.

    pyarrow and JSON take many times the memory.

    Raises OSError.
    """
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        if int.from_bytes(file.read(4), "little") > MAX_HEADER_BYTES:
            raise OSError(f"its metadata has more than {MAX_HEADER_BYTES:,} bytes")
    return size


def _has_bytes(arrow_type: Any) -> bool:
    """Return whether a column type is binary, or a struct with a binary field `bytes`."""
    from pyarrow import types

    place = arrow_type.get_field_index("bytes") if types.is_struct(arrow_type) else -1
    return _is_binary(arrow_type) or (place >= 0 and _is_binary(arrow_type.field(place).type))


def _is_binary(arrow_type: Any) -> bool:
    return str(arrow_type) in ("binary", "large_binary", "binary_view")


def _classes(metadata: dict[bytes, bytes], label: str) -> list[str] | None:
    try:
        names = parse_json(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, ValueError, TypeError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _split(files: list[_File], labels: np.ndarray) -> SourceSplit:
    begins = [0, *accumulate(len(file.labels) for file in files)]
    largest = max(file.group_bytes for file in files)
    most = max(4, min(_KEPT, _KEPT_BYTES // max(1, largest)))
    kept = OrderedDict[tuple[int, int], Any]()
    room = min(_KEPT_BYTES, max(4 * _SMALL, _EXPANSION * sum(file.size for file in files)))
    lock = threading.Lock()  # without it, two threads could read the same row group

    def read(i: int) -> bytes:
        number = bisect_right(begins, i) - 1
        file, row = files[number], i - begins[number]
        group = bisect_right(file.starts, row) - 1
        with lock:
            if (number, group) not in kept:
                kept[number, group] = file.group(group)
                # Their true size, since the one that a file states may be wrong.
                while len(kept) > most or (len(kept) > 1 and sum(one.nbytes for one in kept.values()) > room):
                    kept.popitem(last=False)
            kept.move_to_end((number, group))
            image = kept[number, group][row - file.starts[group]].as_py()
        data: bytes | None = image["bytes"] if isinstance(image, dict) else image
        if not data:
            raise DataError(f"row {row} of '{file.path}' has no image bytes, only a path or nothing")
        if len(data) > MAX_IMAGE_BYTES:
            raise DataError(
                f"row {row} of '{file.path}' has {len(data):,} bytes: the limit for images is {MAX_IMAGE_BYTES:,}"
            )
        return data

    def name(i: int) -> str:
        number = bisect_right(begins, i) - 1
        return f"{files[number].path}/row {i - begins[number]}"

    block = max(b - a for file in files for a, b in zip(file.starts, file.starts[1:], strict=False))
    window = most // 2 * block  # halved, since a run of a block's length may straddle two row groups
    return SourceSplit(Names(len(labels), name), labels.astype(np.int32), read, block, window)
