"""Warnings and files that commands write. A file that cannot be written is refused before anything runs."""

import os
from pathlib import Path

import typer

from vitpar.errors import PlannerError
from vitpar.io import write_text


def warn(*sentences: str | None) -> None:
    """Print warnings to stderr, those that are not None."""
    for sentence in filter(None, sentences):
        typer.echo(f"warning: {sentence}", err=True)


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
