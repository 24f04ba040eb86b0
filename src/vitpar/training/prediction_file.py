"""Predictions of an evaluation as a Parquet file, one row per image in the order of the data set.

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

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitpar.training.evaluate import Predictions
from vitpar.training.parquet_file import ParquetFile, arrow, utf8

GROUP_ROWS = 1 << 17
"""Rows of a row group."""


class PredictionFile(ParquetFile):
    """Writer of a file of predictions, which appears under its name when it is complete. A context manager.

    path: name of the file; an existing one is replaced.
    like: predictions of any images, for the types of the columns.
    about: JSON values that describe the predictions, for the file's metadata under the key `vitpar`.

    Raises DataError if pyarrow is not installed, or if the file cannot be written.
    """

    def __init__(self, path: Path, like: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        pa = arrow()
        types = {
            "data": pa.string(),
            "index": pa.int64(),
            "key": pa.string(),
            "label": pa.int64(),
            **{name: _type(pa, values) for name, values in like.items()},
        }
        super().__init__(path, [pa.field(name, kind, nullable=False) for name, kind in types.items()], about)
        self._types = types
        self._columns: dict[str, list[Any]] = {name: [] for name in types}

    def add(self, data: str, keys: Sequence[str], predictions: Predictions) -> None:
        """Append rows.

        data: name of the data set.
        keys: keys of the images; what cannot be written as UTF-8 is escaped.
        predictions: those for the images.
        """
        rows: dict[str, Sequence[Any] | Tensor] = {
            "data": [utf8(data)] * len(keys),
            "index": predictions.samples,
            "key": [utf8(key) for key in keys],
            "label": predictions.labels,
            **predictions.values,
        }
        for name, values in rows.items():
            self._columns[name] += values.tolist() if isinstance(values, Tensor) else values
        if len(self._columns["key"]) >= GROUP_ROWS:
            self.flush()

    def waiting(self) -> list[Any] | None:
        """Return the columns of the rows that wait to be written, and forget them."""
        columns, self._columns = self._columns, {name: [] for name in self._types}
        if not columns["key"]:
            return None
        return [self._arrow.array(values, self._types[name]) for name, values in columns.items()]


def _type(pa: Any, values: Tensor) -> Any:
    """Return the type of a column of `values`, [images] or [images, k]."""
    number = pa.float64() if values.is_floating_point() else pa.int64()
    return number if values.ndim == 1 else pa.list_(number, values.shape[1])
