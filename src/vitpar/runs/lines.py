"""Lines of the text files of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitpar.io import open_regular


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file with their ends.

    Raises OSError.
    """
    with open_regular(path) as file:
        yield from file


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line of JSON; None if the line is none, damaged or hostile."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
