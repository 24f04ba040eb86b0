"""Features of images as a Parquet file, written row group by row group.

| column    | type                                | content                                             |
|-----------|-------------------------------------|-----------------------------------------------------|
| key       | string                              | path of the image, or shard and key of the sample   |
| label     | int64, null for images without one  | class number                                        |
| embedding | list of float32 of a fixed length   | input of the model's classifier                     |
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from vitpar.errors import DataError

GROUP_BYTES = 32 << 20
"""Bytes of embeddings in a row group, beyond which it is written."""


class FeatureFile:
    """Writer of a file of features, which appears under its name when it is complete. A context manager.

    path: name of the file; an existing one is replaced.
    width: features of an image.
    about: JSON values that describe the features, for the file's metadata under the key `vitpar`.

    Raises DataError if pyarrow is not installed, or if the file cannot be written.
    """

    def __init__(self, path: Path, width: int, about: Mapping[str, Any]) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise DataError("Parquet files need pyarrow: pip install 'vitpar[parquet]'") from None
        self._arrow, self._path, self._width = pyarrow, path, width
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        fields = [
            pyarrow.field("key", pyarrow.string(), nullable=False),
            pyarrow.field("label", pyarrow.int64()),
            pyarrow.field("embedding", pyarrow.list_(pyarrow.float32(), width), nullable=False),
        ]
        self._schema = pyarrow.schema(fields, metadata={"vitpar": json.dumps(about)})
        self._keys: list[str] = []
        self._labels: list[int | None] = []
        self._rows: list[Tensor] = []
        try:
            self._partial.unlink(missing_ok=True)  # left by a killed process
            self._file = self._partial.open("xb")
            self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema)
        except OSError as error:
            raise self._refusal(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write()
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._partial, self._path)
        except OSError as problem:
            raise self._refusal(problem) from None
        finally:
            with suppress(OSError, ValueError):
                self._writer.close()
            self._file.close()
            with suppress(OSError):  # already renamed
                self._partial.unlink()

    def add(self, keys: Sequence[str], labels: Sequence[int | None], features: Tensor) -> None:
        """Append rows.

        keys: what cannot be written as UTF-8 is escaped.
        features: float32 [rows, width] on the CPU.
        """
        self._keys += [key.encode("utf-8", "backslashreplace").decode() for key in keys]
        self._labels += labels
        self._rows.append(features)
        if len(self._keys) * self._width * 4 >= GROUP_BYTES:
            try:
                self._write()
            except OSError as error:
                raise self._refusal(error) from None

    def _write(self) -> None:
        """Write the rows so far as a row group."""
        if not self._keys:
            return
        arrow = self._arrow
        numbers = [arrow.array(rows.contiguous().numpy().reshape(-1), arrow.float32()) for rows in self._rows]
        flat = arrow.concat_arrays(numbers)
        columns = [
            arrow.array(self._keys, arrow.string()),
            arrow.array(self._labels, arrow.int64()),
            arrow.FixedSizeListArray.from_arrays(flat, self._width),
        ]
        self._writer.write_table(arrow.Table.from_arrays(columns, schema=self._schema), row_group_size=len(self._keys))
        self._keys, self._labels, self._rows = [], [], []

    def _refusal(self, error: OSError) -> DataError:
        return DataError(f"'{self._path}' cannot be written: {error.strerror or error}")
