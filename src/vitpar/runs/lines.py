"""Lines of the text files of a run, within limits."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitpar.io import open_regular
from vitpar.limits import MAX_LINE_BYTES, MAX_TEXT_BYTES

CHUNKS = 16
"""Longest line that is skipped, in MAX_LINE_BYTES. A file with a longer one is no text, and is not read further."""


def lines_of(path: Path) -> Iterator[bytes | None]:
    """Yield the lines of a file with their ends, and None for each that is too long.

    Raises OSError, also for a file that is too large.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_TEXT_BYTES:,} bytes", str(path))
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) <= MAX_LINE_BYTES:
                yield line
                continue
            yield None
            for _ in range(CHUNKS):
                if not line or line.endswith(b"\n"):
                    break
                line = file.readline(MAX_LINE_BYTES)
            else:
                return


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line of JSON; None if the line is none, damaged or hostile."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
