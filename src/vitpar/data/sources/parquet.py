"""Hugging Face's image data sets in Parquet files with a column of encoded images and one of class labels."""

from __future__ import annotations

import threading
from bisect import bisect_right
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.sources.source import (
    Source,
    SourceSplit,
    by_split,
    numbered,
    parquet_library,
    reading,
    split_of,
    using,
)
from vitpar.errors import DataError
from vitpar.io import open_regular, parse_json
from vitpar.text import either, shown

_IMAGES, _LABELS = ("image", "img"), ("label", "labels", "fine_label")
_MISSING = -1  # label of a row without one
_KEPT, _KEPT_BYTES = 64, 1 << 30  # limits of the cache of row groups: their number and their bytes


def parquet(folder: Path) -> Source:
    """Return the source in the files that `parquet_files` finds.

    Names of files such as ``train-00000-of-00002.parquet``, or else of their folders, tell the splits.

    Raises DataError, also if pyarrow is not installed.
    """
    paths = by_split(parquet_files(folder), folder)
    tables = {split: [_File(path) for path in files] for split, files in paths.items()}
    # Contests keep the labels of their test split secret and publish negative ones, or none.
    left_out = []
    if "test" in tables and all((file.labels < 0).all() for file in tables["test"]):
        left_out = [f"'{tables.pop('test')[0].path}' and other files of test: they have no labels"]
    naming = [file for files in tables.values() for file in files if file.classes]
    other = next((file for file in naming if file.classes != naming[0].classes), None)
    if other is not None:
        raise DataError(f"'{other.path}' names other classes than '{naming[0].path}', or in another order: pack one")
    labels = {split: np.concatenate([file.labels for file in group]) for split, group in tables.items()}
    for split, numbers in labels.items():
        if len(missing := np.flatnonzero(numbers == _MISSING)):
            raise DataError(
                f"{len(missing):,} rows of '{split}' in '{folder}' have no label (null or -1), the first is row "
                f"{missing[0]}: remove or label them"
            )
    named = naming[0].classes if naming else None
    classes = named or numbered([int(label) for split in labels.values() for label in np.unique(split)])
    for split, numbers in labels.items():
        if len(wrong := numbers[(numbers < 0) | (numbers >= len(classes))]):
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
    """

    def __init__(self, path: Path) -> None:
        library = parquet_library()
        from pyarrow import types

        self.path = path
        with reading(path):
            open_regular(path).close()
        with using(f"'{path}' cannot be read as Parquet"):
            self._meta, schema = library.read_metadata(path), library.read_schema(path)
            images = next((f for f in schema if f.name in _IMAGES and _column_of_bytes(f)), None)
            label = next((f.name for f in schema if f.name in _LABELS and types.is_integer(f.type)), None)
            if images is None or label is None:
                raise DataError(
                    f"'{path}' has the columns {shown(', '.join(schema.names))}: it needs `image` (bytes) and "
                    "`label` (integers)"
                )
            self.image, self.column = images.name, _column_of_bytes(images)
            groups = [self._meta.row_group(i) for i in range(self._meta.num_row_groups)]
            self.group_bytes = max((group.total_byte_size for group in groups), default=0)
            self.starts = [0, *accumulate(group.num_rows for group in groups)]
            column = library.read_table(path, columns=[label])[label]
            self.labels = np.asarray(column.fill_null(_MISSING).to_numpy(), dtype=np.int64)
            self.classes: list[str] | None = None
            with suppress(KeyError, TypeError):
                names = parse_json(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
                self.classes = [str(name) for name in names] if isinstance(names, list) else None

    def group(self, number: int) -> Any:
        """Return the images of row group `number`: a pyarrow.ChunkedArray of bytes, or of structs with a field `bytes`.

        Raises DataError.
        """
        # Closed again, since there may be many files.
        with (
            using(f"'{self.path}' cannot be read"),
            parquet_library().ParquetFile(self.path, metadata=self._meta) as file,
        ):
            return file.read_row_group(number, columns=[self.column])[self.image]


def _column_of_bytes(field: Any) -> str | None:
    """Return the column of bytes of a field that is binary, or a struct with a binary field `bytes`; None of others."""
    from pyarrow import types

    binary = ("binary", "large_binary", "binary_view")
    if str(field.type) in binary:
        return str(field.name)
    place = field.type.get_field_index("bytes") if types.is_struct(field.type) else -1
    return f"{field.name}.bytes" if place >= 0 and str(field.type.field(place).type) in binary else None


def _split(files: list[_File], labels: np.ndarray) -> SourceSplit:
    begins = [0, *accumulate(len(file.labels) for file in files)]
    largest = max(file.group_bytes for file in files)
    most = max(4, min(_KEPT, _KEPT_BYTES // max(1, largest)))
    groups = lru_cache(most)(lambda file, group: files[file].group(group))
    lock = threading.Lock()  # without it, two threads could read the same row group

    def read(i: int) -> bytes:
        number = bisect_right(begins, i) - 1
        file, row = files[number], i - begins[number]
        group = bisect_right(file.starts, row) - 1
        with lock:
            image = groups(number, group)[row - file.starts[group]].as_py()
        data: bytes | None = image["bytes"] if isinstance(image, dict) else image
        if not data:
            raise DataError(f"row {row} of '{file.path}' has no image bytes, only a path or nothing")
        return data

    def name(i: int) -> str:
        number = bisect_right(begins, i) - 1
        return f"{files[number].path}/row {i - begins[number]}"

    block = max(b - a for file in files for a, b in pairwise(file.starts))
    window = most // 2 * block  # halved, since a run of a block's length may straddle two row groups
    return SourceSplit(name, labels.astype(np.int32), read, block, window)
