"""Promises to a user of hostile files, and how a reader that took a case breaks them.

A reader accepts a case or raises a UserError that says what is wrong, in at most LONGEST characters, none of which
controls a terminal, and without a memory address, which would differ every time.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import vitpar
from vitpar.errors import UserError

LONGEST = 1200
ADDRESS = re.compile(r"\bat 0x(?=[0-9a-f]*[a-f])[0-9a-f]{9,}")
"""Longer than a checksum of 32 bits, and with a letter: a strategy such as dp10x100000000 has none."""
HERE = Path(__file__).parent
READERS = Path(vitpar.__file__).parent
_LINES = 12


class Wrong(Exception):
    """Something was accepted that is not right, or done that no reader may do."""


class Worse(Wrong):
    """Work after an accepted case broke a promise.

    found: how.
    """

    def __init__(self, found: list[Finding]) -> None:
        super().__init__("; ".join(finding.words for finding in found))
        self.found = found


@dataclass(frozen=True)
class Finding:
    """kind: error, message, damage, memory, hang, crash, program or place; harness for its own faults. where: file:line
    of vitpar, as far as known; with `kind` and `sort` it tells findings apart. words: what happened, perhaps in several
    lines."""

    kind: str
    sort: str
    where: str
    words: str


def of_error(error: BaseException) -> list[Finding]:
    """Return the findings in `error`, which reading a case raised."""
    if isinstance(error, Worse):
        return error.found
    if isinstance(error, UserError):
        found = []
        if problem := message_problem(error):
            found.append(Finding("message", problem.partition(":")[0], place(error), f"{problem}\n{error!s:.2000}"))
        if any(map(lacks_memory, causes(error))):
            words = "it was refused only because there was not so much memory to be had\n"
            found.append(Finding("memory", "asked for", place(error), words + trace(error)))
        return found
    if isinstance(error, Wrong):
        first = str(error).partition("\n")[0]
        return [Finding("damage", re.sub(r"[0-9]+", "N", first)[:60], place(error), f"{error}\n{trace(error)}")]
    kind = "memory" if lacks_memory(error) else "error"
    return [Finding(kind, type(error).__name__, place(error), trace(error))]


def lacks_memory(error: BaseException) -> bool:
    """Whether an allocation failed. (Address space for a mapped file is none, nor is the stack of Python's parser.)"""
    if isinstance(error, MemoryError):
        frames = traceback.extract_tb(error.__traceback__)
        return not (frames and frames[-1].filename.endswith("/ast.py"))
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def message_problem(error: UserError) -> str | None:
    """Return what is wrong with the message of a refusal, None if nothing."""
    try:
        words = str(error)
    except Exception as failed:
        return f"the message cannot be made: {failed!r:.200}"
    if len(words) > LONGEST:
        return f"the message is too long: {len(words):,} characters"
    if found := ADDRESS.search(words):
        return f"the message has an address of memory: {found[0]}"
    odd = next((char for char in words if not char.isprintable() and char != "\n"), None)
    return None if odd is None else f"the message has an unprintable character: {odd!a}"


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and what it came from."""
    seen = set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def place(error: BaseException) -> str:
    """file:line of the innermost frame of vitpar's in the traceback of `error`, else in that of what it came from."""
    frames = [reversed(traceback.extract_tb(cause.__traceback__)) for cause in causes(error)]
    ours = (frame for each in frames for frame in each if frame.filename.startswith(str(READERS)))
    frame = next(ours, None)
    return f"{short(frame.filename)}:{frame.lineno}" if frame else "?"


def short(filename: str) -> str:
    """The path of a file of vitpar's in its package, else its last parts."""
    path = Path(filename)
    return str(path.relative_to(READERS.parent)) if path.is_relative_to(READERS.parent) else "/".join(path.parts[-2:])


def trace(error: BaseException, lines: int | None = _LINES) -> str:
    """The last lines of its traceback."""
    text = "".join(traceback.format_exception(error)).rstrip().split("\n")
    shown = text if lines is None else text[-lines:]
    return "\n".join(line if len(line) <= 300 else f"{line[:300]}…" for line in shown)
