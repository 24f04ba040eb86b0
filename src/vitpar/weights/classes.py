"""Names of the classes of saved weights and checkpoints."""

from __future__ import annotations

from pathlib import Path

from vitpar.checkpoint.index import CLASSES, first_line
from vitpar.errors import DataError
from vitpar.io import read_json


def read_class_names(folder: Path, classes: int | None = None) -> tuple[str, ...] | None:
    """Return the names of the classes of saved weights or of a checkpoint; None if it has none.

    classes: number of classes of the model; None for any.

    Raises DataError for a file that is not a list of that many names.
    """
    path = folder / CLASSES
    if not path.exists():
        return None
    try:
        names = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {first_line(error)}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"'{path}' is not a list of names: remove it to use numbers")
    if classes is not None and len(names) != classes:
        raise DataError(
            f"'{path}' has {len(names):,} names but the model has {classes:,} classes: remove it to use numbers"
        )
    return tuple(names)
