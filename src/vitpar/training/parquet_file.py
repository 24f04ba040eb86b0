"""Parquet files that are written row group by row group and appear when they are complete."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vitpar.errors import DataError


def arrow() -> Any:
    """Return the module pyarrow, with its part for Parquet. Raises DataError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet files need pyarrow: pip install -e '.[parquet]'") from None
    return pyarrow


def utf8(text: str) -> str:
    """Return `text` with characters that cannot be written as UTF-8 escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


class ParquetFile:
    """Writer of a Parquet file, which appears under its name when it is complete. A context manager.

    path: name of the file; an existing one is replaced.
    fields: columns of the file, of pyarrow.
    about: JSON values that describe the rows, for the file's metadata under the key `vitpar`.

    Raises DataError if the file cannot be written.
    """

    def __init__(self, path: Path, fields: Sequence[Any], about: Mapping[str, Any]) -> None:
        self._arrow, self._path = arrow(), path
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        self._schema = self._arrow.schema(fields, metadata={"vitpar": json.dumps(about)})
        try:
            self._partial.unlink(missing_ok=True)  # left by a killed process
            self._file = self._partial.open("xb")
            self._writer = self._arrow.parquet.ParquetWriter(self._file, self._schema)
        except OSError as error:
            raise self._refusal(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self.flush()
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._partial, self._path)
        except OSError as problem:
            raise self._refusal(problem) from None
        finally:
            for opened in (self._writer, self._file):  # a full disk fails again
                with suppress(OSError, ValueError):
                    opened.close()
            with suppress(OSError):  # already renamed
                self._partial.unlink()

    def flush(self) -> None:
        """Write the waiting rows as a row group.

        Raises DataError if they cannot be written.
        """
        columns = self.waiting()
        if columns is None:
            return
        table = self._arrow.Table.from_arrays(columns, schema=self._schema)
        try:
            self._writer.write_table(table, row_group_size=len(table))
        except OSError as error:
            raise self._refusal(error) from None

    def waiting(self) -> list[Any] | None:
        """Return the columns of the rows that wait to be written, as arrays of pyarrow, and forget them.

        None if no row waits.
        """
        raise NotImplementedError

    def _refusal(self, error: OSError) -> DataError:
        return DataError(f"'{self._path}' cannot be written: {error.strerror or error}")
