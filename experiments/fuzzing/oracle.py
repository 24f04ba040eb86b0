"""Guarantees for untrusted files, and findings about readers that break them.

A reader must accept a case or raise a UserError that says what is wrong. The message must have at most LONGEST
characters, no control characters, and no memory address, which would differ every time.
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
"""Most characters of an error message."""
ADDRESS = re.compile(r"\bat 0x(?=[0-9a-f]*[a-f])[0-9a-f]{9,}")
"""Memory address. It is longer than a 32-bit checksum and has a letter, unlike a strategy such as dp10x100000000."""
HERE = Path(__file__).parent
READERS = Path(vitpar.__file__).parent
_LINES = 12


class Wrong(Exception):
    """A reader accepted a wrong input or did something forbidden."""


class Worse(Wrong):
    """Using an accepted input broke a guarantee.

    found: the findings.
    """

    def __init__(self, found: list[Finding]) -> None:
        super().__init__("; ".join(finding.words for finding in found))
        self.found = found


@dataclass(frozen=True)
class Finding:
    """A broken guarantee. Findings with the same kind, sort and place are the same finding."""

    kind: str
    """error, message, damage, memory, hang, crash, program, place, or harness for errors of the fuzzer itself."""
    sort: str
    """More exact kind, for example the class of the error."""
    where: str
    """file:line in vitpar, `?` if unknown."""
    words: str
    """Description, in one or several lines."""


def of_error(error: BaseException) -> list[Finding]:
    """Return the findings about an error that reading a case raised."""
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
    """Return whether an allocation failed.

    Failing to map a file does not count, nor does a full stack of Python's parser, which raises MemoryError too.
    """
    if isinstance(error, MemoryError):
        frames = traceback.extract_tb(error.__traceback__)
        return not (frames and frames[-1].filename.endswith("/ast.py"))
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def message_problem(error: UserError) -> str | None:
    """Return what is wrong with an error message, or None."""
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
    """Yield `error` and the chain of its causes."""
    seen = set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def place(error: BaseException) -> str:
    """Return file:line of the innermost frame of vitpar in the traceback of `error`, else in those of its causes."""
    frames = [reversed(traceback.extract_tb(cause.__traceback__)) for cause in causes(error)]
    ours = (frame for each in frames for frame in each if frame.filename.startswith(str(READERS)))
    frame = next(ours, None)
    return f"{short(frame.filename)}:{frame.lineno}" if frame else "?"


def short(filename: str) -> str:
    """Return the path of a file relative to vitpar's package, or the last two parts of other paths."""
    path = Path(filename)
    return str(path.relative_to(READERS.parent)) if path.is_relative_to(READERS.parent) else "/".join(path.parts[-2:])


def trace(error: BaseException, lines: int | None = _LINES) -> str:
    """Return the last `lines` lines of the traceback of `error`, None for all."""
    text = "".join(traceback.format_exception(error)).rstrip().split("\n")
    shown = text if lines is None else text[-lines:]
    return "\n".join(line if len(line) <= 300 else f"{line[:300]}…" for line in shown)
