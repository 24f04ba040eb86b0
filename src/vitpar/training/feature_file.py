"""Features of images as a Parquet file, written row group by row group.

| column    | type                                | content                                             |
|-----------|-------------------------------------|-----------------------------------------------------|
| key       | string                              | path of the image, or shard and key of the sample   |
| label     | int64, null for images without one  | class number                                        |
| embedding | list of float32 of a fixed length   | input of the model's classifier                     |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitpar.training.parquet_file import ParquetFile, arrow, utf8

GROUP_BYTES = 32 << 20
"""Bytes of embeddings in a row group, beyond which it is written."""


class FeatureFile(ParquetFile):
    """Writer of a file of features, which appears under its name when it is complete. A context manager.

    path: name of the file; an existing one is replaced.
    width: features of an image.
    about: JSON values that describe the features, for the file's metadata under the key `vitpar`.

    Raises DataError if pyarrow is not installed, or if the file cannot be written.
    """

    def __init__(self, path: Path, width: int, about: Mapping[str, Any]) -> None:
        pa = arrow()
        fields = [
            pa.field("key", pa.string(), nullable=False),
            pa.field("label", pa.int64()),
            pa.field("embedding", pa.list_(pa.float32(), width), nullable=False),
        ]
        super().__init__(path, fields, about)
        self._width = width
        self._keys: list[str] = []
        self._labels: list[int | None] = []
        self._rows: list[Tensor] = []

    def add(self, keys: Sequence[str], labels: Sequence[int | None], features: Tensor) -> None:
        """Append rows.

        keys: what cannot be written as UTF-8 is escaped.
        features: float32 [rows, width] on the CPU.
        """
        self._keys += map(utf8, keys)
        self._labels += labels
        self._rows.append(features)
        if len(self._keys) * self._width * 4 >= GROUP_BYTES:
            self.flush()

    def waiting(self) -> list[Any] | None:
        """Return the columns of the rows that wait to be written, and forget them."""
        if not self._keys:
            return None
        pa = self._arrow
        numbers = [pa.array(rows.contiguous().numpy().reshape(-1), pa.float32()) for rows in self._rows]
        columns = [
            pa.array(self._keys, pa.string()),
            pa.array(self._labels, pa.int64()),
            pa.FixedSizeListArray.from_arrays(pa.concat_arrays(numbers), self._width),
        ]
        self._keys, self._labels, self._rows = [], [], []
        return columns
