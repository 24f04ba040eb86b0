"""Lines for a terminal, which would break them inside words."""

import os
import re
import sys
from typing import TextIO

_UNIT = re.compile(r"(?:`[^`]*`|(?<!\w)'[^']*'(?!\w)|pip install (?:-e )?(?=\S)|\S)+")
"""Text that stays on one line, so that it can be copied: a word, a path, a quotation or a command in backticks."""


def wrap(text: str, width: int, indent: int = 2) -> str:
    """Return a line broken between words into lines of `width` columns; longer words stay whole.

    A text of several lines, such as a traceback, is returned unchanged.

    indent: columns before each line but the first.
    """
    if "\n" in text or len(text) <= width:
        return text
    lines, end = [""], 0
    for unit in _UNIT.finditer(text):
        gap = text[end : unit.start()]
        if len(lines[-1]) + len(gap) + len(unit[0]) > width and lines[-1].strip():
            lines.append(" " * indent + unit[0])
        else:
            lines[-1] += gap + unit[0]
        end = unit.end()
    return "\n".join(lines)


def forwarded() -> None:
    """Note that what this process prints is forwarded, so that no stream counts as a terminal.

    OpenMPI gives ranks a pseudo-terminal as stdout and forwards what they print, also to a pipe or a file.
    """
    os.environ["TERM"] = "dumb"  # rich writes no escape codes then


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` writes to a terminal that can move the cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def complain(text: str) -> None:
    """Print a warning or an error to stderr, broken between words if that is a terminal."""
    _print(text, sys.stderr, 2)


def say(text: str, indent: int = 2) -> None:
    """Print a line to stdout, broken between words if that is a terminal. indent: as of `wrap`."""
    _print(text, sys.stdout, indent)


def _print(text: str, stream: TextIO, indent: int) -> None:
    width = _columns(stream) if is_terminal(stream) else None
    print(text if width is None else wrap(text, width, indent), file=stream, flush=True)


def _columns(terminal: TextIO) -> int | None:
    """Return the width of a terminal; None if it does not say."""
    try:
        return int(os.environ.get("COLUMNS", "")) or None
    except ValueError:
        return os.get_terminal_size(terminal.fileno()).columns or None
