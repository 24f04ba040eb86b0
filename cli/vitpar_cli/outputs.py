"""Files that commands write: refused before anything runs where they cannot be."""

import os
from pathlib import Path

from vitpar.errors import PlannerError
from vitpar.files import write_text


def refuse_unwritable(*paths: Path | None) -> None:
    """Raise PlannerError for a path, of those given, that cannot be written."""
    for path in paths:
        if path is None:
            continue
        folder = path.absolute().parent
        if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK):
            raise PlannerError(f"cannot write {path}: name a file in a folder that exists and may be written to")


def write(path: Path, text: str) -> None:
    """Write it whole or not at all. Raises PlannerError."""
    try:
        write_text(path, text)
    except OSError as error:
        raise PlannerError(f"cannot write {path}: {error.strerror}") from None
