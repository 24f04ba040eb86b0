"""Guarantees for untrusted input, and findings about readers that break them.

A reader must accept a case or raise a UserError that says what is wrong. The message must have at most LONGEST
characters, no control characters, and no memory address, which would differ every time.
"""

import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import vitpar
from vitpar.errors import UserError

LONGEST = 1200
"""Most characters of an error message."""
ADDRESS = re.compile(r"\bat 0x(?=[0-9a-f]*[a-f])[0-9a-f]{9,}")
"""Memory address. It is longer than a 32-bit checksum and has a letter, unlike a strategy such as dp10x100000000."""
PACKAGES = f"{Path(vitpar.__file__).parents[1]}/"
Result = TypeVar("Result")
Key = tuple[str, str, str]


class Wrong(Exception):
    """A reader accepted a wrong input or did something forbidden."""


class Finding(NamedTuple):
    """A broken guarantee. Findings with the same kind, sort and place are the same finding."""

    kind: str
    """error, message, damage, hang, crash, program, place, or harness for errors of the fuzzer itself."""
    sort: str
    """More exact kind, for example the class of the error."""
    where: str
    """file:line in vitpar, `?` if unknown."""
    words: str
    """Description, in one or several lines."""

    @property
    def key(self) -> Key:
        """Identity of the finding."""
        return self[:3]


def of_error(error: BaseException, is_seed: bool = False) -> Iterator[Finding]:
    """Yield the findings about an error that reading a case raised."""
    words = trace(error)
    where = place(words)
    if isinstance(error, Wrong):
        yield Finding("damage", re.sub(r"[0-9]+", "N", str(error).partition("\n")[0])[:60], where, words)
    elif lacks_memory(error):
        return
    elif not isinstance(error, UserError):
        yield Finding("error", type(error).__name__, where, words)
    else:
        if problem := message_problem(error):
            yield Finding("message", problem.partition(":")[0], where, f"{problem}\n{words:.3000}")
        if is_seed:
            yield Finding("damage", "seed", where, f"a seed is refused: {error}")


def tolerated(call: Callable[[], Result]) -> Result | None:
    """Return the result of `call`, or None if it raises a UserError with a good message.

    For uses of an accepted input that may be refused themselves.
    """
    try:
        return call()
    except UserError as error:
        if found := next(of_error(error), None):
            raise Wrong(f"{found.kind}: {found.words}") from error
        return None


def lacks_memory(error: BaseException | None) -> bool:
    """Return whether an allocation failed, also as the cause of another error.

    Failing to map a file does not count, nor does a full stack of Python's parser, which raises MemoryError too.
    """
    if error is None:
        return False
    frames = traceback.extract_tb(error.__traceback__)
    memory = isinstance(error, MemoryError) and not (frames and frames[-1].filename.endswith("/ast.py"))
    memory |= isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return memory or lacks_memory(error.__cause__ or error.__context__)


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


def place(text: str, innermost: int = -1) -> str:
    """Return file:line of the innermost frame of vitpar in the text of a traceback, `?` if there is none.

    innermost: 0 if the innermost frame is the first, as in the stacks of faulthandler.
    """
    frames = re.findall(rf'File "{re.escape(PACKAGES)}(vitpar/[^"]+)", line (\d+)', text)
    return ":".join(frames[innermost]) if frames else "?"


def trace(error: BaseException) -> str:
    """Return the traceback of `error` with lines of at most 300 characters."""
    return "\n".join(f"{line:.300}" for line in "".join(traceback.format_exception(error)).rstrip().split("\n"))
