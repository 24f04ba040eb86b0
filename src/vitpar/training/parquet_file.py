"""Parquet files of features and of predictions, written row group by row group, which appear when they are complete.

Those of features are also read here.

`vitpar features` writes a row for each image:

| column    | type                                | content                                             |
|-----------|-------------------------------------|-----------------------------------------------------|
| key       | string                              | path of the image, or shard and key of the sample   |
| label     | int64, null for images without one  | class number                                        |
| embedding | list of float32 of a fixed length   | input of the model's classifier                     |

`vitpar eval --predictions` writes a row for each image in the order of the data set:

| column | type   | content                                                     |
|--------|--------|-------------------------------------------------------------|
| data   | string | data set, as named on the command line                      |
| index  | int64  | number of the image in the split, from 0                    |
| key    | string | shard and key of the image                                  |
| label  | int64  | number of its label; for classification that in the weights |

Then follow the columns of the task (``Task.predict``), numbers or lists of a fixed length. Those of classification:

| column             | type            | content                                            |
|--------------------|-----------------|----------------------------------------------------|
| predicted          | int64           | class with the highest probability                 |
| probability        | float64         | that probability                                   |
| top5_classes       | list of int64   | the most probable classes, the most probable first |
| top5_probabilities | list of float64 | their probabilities                                |
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from vitpar.errors import DataError
from vitpar.io import parse_json, stat_regular
from vitpar.limits import MAX_CLASSES
from vitpar.text import shown

GROUP_BYTES = 32 << 20
"""Bytes of rows, beyond which a row group is written."""


def arrow() -> Any:
    """Return the module pyarrow, with its part for Parquet. Raises DataError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet files need pyarrow: pip install -e '.[parquet]'") from None
    return pyarrow


class ParquetFile:
    """Writer of a Parquet file, which appears under its name when it is complete. A context manager.

    path: name of the file; an existing one is replaced.
    like: values of any rows by column, text or [rows] or [rows, k], for the types of the columns.
    about: JSON values that describe the rows, for the file's metadata under the key `vitpar`.
    nullable: columns that may lack a value.

    Raises DataError if pyarrow is not installed, or if the file cannot be written.
    """

    def __init__(
        self, path: Path, like: Mapping[str, Tensor | str], about: Mapping[str, Any], nullable: Sequence[str] = ()
    ) -> None:
        self._arrow, self._path = arrow(), path
        fields = []
        for name, values in like.items():
            kind = self._arrow.string() if isinstance(values, str) else self._array(values, None).type
            fields.append(self._arrow.field(name, kind, name in nullable))
        self._schema = self._arrow.schema(fields, metadata={"vitpar": json.dumps(about)})
        self._waiting: list[Any] = []
        self._partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._partial.unlink(missing_ok=True)  # left by a killed process
            self._file = self._partial.open("xb")
            self._writer = self._arrow.parquet.ParquetWriter(self._file, self._schema)
        except OSError as error:
            raise self._refusal(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        try:
            if error_type is None:
                self._flush()
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

    def add(self, *columns: Tensor | Sequence[Any]) -> None:
        """Append rows by column. Text that is not UTF-8 is escaped. Raises DataError if they cannot be written."""
        arrays = [self._array(*one) for one in zip(columns, self._schema.types, strict=True)]
        self._waiting.append(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        if sum(table.nbytes for table in self._waiting) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = self._arrow.concat_tables(self._waiting)
        self._waiting = []
        try:
            self._writer.write_table(rows, row_group_size=len(rows))
        except OSError as error:
            raise self._refusal(error) from None

    def _array(self, values: Tensor | Sequence[Any], kind: Any) -> Any:
        if not isinstance(values, Tensor):
            escape = "backslashreplace"  # what cannot be written as UTF-8
            texts = [one.encode("utf-8", escape).decode() if isinstance(one, str) else one for one in values]
            return self._arrow.array(texts, kind)
        numbers = values if values.is_floating_point() else values.long()
        flat = self._arrow.array(numbers.flatten().numpy())
        return flat if values.ndim == 1 else self._arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])

    def _refusal(self, error: OSError) -> DataError:
        return DataError(f"'{self._path}' cannot be written: {error.strerror or error}")


def feature_file(path: Path, width: int, about: Mapping[str, Any]) -> ParquetFile:
    """Return the writer of `vitpar features`. width: features of an image."""
    like: dict[str, Tensor | str] = {"key": ""}
    like |= {"label": torch.zeros(1, dtype=torch.int64), "embedding": torch.zeros(1, width)}
    return ParquetFile(path, like, about, nullable=("label",))


def prediction_file(path: Path, like: Mapping[str, Tensor], about: Mapping[str, Any]) -> ParquetFile:
    """Return the writer of `vitpar eval --predictions`. like: predictions of any images (``Task.predict``)."""
    number = torch.zeros(1, dtype=torch.int64)
    return ParquetFile(path, {"data": "", "index": number, "key": "", "label": number, **like}, about)


@dataclass(frozen=True)
class Features:
    """Features of labelled images."""

    embeddings: Tensor
    """Inputs of the classifier, float32 [images, features]."""
    labels: Tensor
    """Class numbers, int64 [images]."""
    about: Mapping[str, Any]
    """Description in the file."""


def read_features(path: Path) -> Features:
    """Return the features in a file. Raises DataError for damage, another kind, and images without a label."""
    library = arrow().parquet
    try:
        stat_regular(path)
        with library.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
            _refuse_others(path, schema)
            width = schema.field("embedding").type.list_size
            embeddings, labels = np.empty((rows, width), np.float32), np.empty(rows, np.int64)
            start = 0
            for batch in file.iter_batches(batch_size=max(1, (1 << 26) // width), columns=["label", "embedding"]):
                stop = start + batch.num_rows
                if batch["label"].null_count or batch["embedding"].null_count:
                    raise DataError(
                        f"'{path}' has rows without a label: extract features of a data set, with "
                        "`vitpar features --data DIR`"
                    )
                embeddings[start:stop] = batch["embedding"].flatten().to_numpy().reshape(-1, width)
                labels[start:stop] = batch["label"].to_numpy()
                start = stop
            about = _about(schema.metadata or {})
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file '{path}': write it with `vitpar features --out {path}`") from None
    except Exception as error:  # damaged files make pyarrow raise nearly anything
        raise DataError(f"'{path}' cannot be read as Parquet ({shown(error)}): write it again") from None
    if not len(labels):
        raise DataError(f"'{path}' has no rows: extract features of at least one image")
    if not 0 <= labels.min() <= labels.max() < MAX_CLASSES:
        raise DataError(f"'{path}' has labels from {labels.min()} to {labels.max()}: use 0 to {MAX_CLASSES - 1:,}")
    if not np.isfinite(embeddings).all():
        raise DataError(f"'{path}' has features that are not finite: extract them in another precision")
    return Features(torch.from_numpy(embeddings), torch.from_numpy(labels), about)


def _refuse_others(path: Path, schema: Any) -> None:
    """Raise DataError for columns that `vitpar features` does not write."""
    from pyarrow import types

    fields: dict[str, Any] = {field.name: field.type for field in schema}
    embedding: Any = fields.get("embedding")
    if (
        not {"label", "embedding"} <= fields.keys()
        or not types.is_int64(fields["label"])
        or not types.is_fixed_size_list(embedding)
        or not types.is_float32(embedding.value_type)
        or embedding.list_size < 1
    ):
        raise DataError(
            f"'{path}' has the columns {shown(', '.join(schema.names))}: it needs `label` (int64) and `embedding` "
            "(fixed-size list of float32), as `vitpar features` writes them"
        )


def _about(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Return the description in a file's metadata, empty if there is none that can be read."""
    try:
        about = parse_json(metadata.get(b"vitpar", b"{}").decode())
    except ValueError:
        about = {}
    if not isinstance(about, dict):
        return {}
    names = about.get("classes")
    known = isinstance(names, list) and len(names) <= MAX_CLASSES and all(isinstance(name, str) for name in names)
    return {**about, "classes": names if known else None}
