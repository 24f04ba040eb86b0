"""Reader of the features that `vitpar features` writes (``vitpar.training.parquet_file``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitpar.errors import DataError
from vitpar.io import parse_json, stat_regular
from vitpar.limits import MAX_CLASSES
from vitpar.text import shown
from vitpar.training.parquet_file import arrow


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
    """Return the features in a file.

    Raises DataError for a file that is damaged, of another kind, or with images that have no label.
    """
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
