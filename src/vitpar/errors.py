"""What a user can get wrong. One sentence each: the offending value and the fix.

The command line prints these without a traceback and exits with code 2; a broken invariant is an ``assert`` instead.
"""

import difflib
from collections.abc import Iterable

from vitpar.limits import MAX_QUOTED_CHARS


class UserError(ValueError):
    """Base of every error that the user, not the program, has to mend."""

    def __str__(self) -> str:
        # Messages quote names out of files of others, which must not steer a terminal.
        return printable(super().__str__())


class StrategyError(UserError):
    """A strategy string or plan that is malformed, or that does not fit the model, the batch or the devices."""


class RecipeError(UserError):
    """A recipe with an unknown key, a wrong value or a setting that contradicts another."""


class ModelError(UserError):
    """An unknown model name or a model option that does not fit the others."""


class DataError(UserError):
    """A missing, empty or damaged data set, or a sample that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or of another model or training, or one that cannot be written."""


class LaunchError(UserError):
    """A world of processes that cannot be formed from the environment found."""


class DeviceMemoryError(UserError):
    """A model, batch and plan that need more memory than a device has."""


class PlannerError(UserError):
    """A profile that cannot be used, or nothing that fits what a search was asked for."""


class FaultError(RuntimeError):
    """A run that a fault ended which is not the user's to mend, such as ranks that hang or disagree. One sentence says
    all there is to say; the exit code is 1."""


def shown(text: object, around: int = 0) -> str:
    """Return `text` for an error message: if it is long, the part with the character number `around`, from 0."""
    words = str(text)
    if len(words) <= MAX_QUOTED_CHARS:
        return words
    kept = MAX_QUOTED_CHARS - 2  # and a sign for each side that may be cut
    start = max(0, min(around - kept // 2, len(words) - kept))
    return f"{'…' * (start > 0)}{words[start : start + kept]}{'…' * (start + kept < len(words))}"


def literal(value: object) -> str:
    """Return `value` for an error message as Python writes it."""
    try:
        return shown(repr(value))
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits"


def printable(text: str) -> str:
    """Return `text` with escapes for control characters, other than line ends, and for what UTF-8 cannot encode."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word most like `word`, or an empty string when none is close."""
    if len(word) > MAX_QUOTED_CHARS:  # comparing takes the square of its length
        return ""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""
