"""Parts of messages: safely quoted input, counts, sizes, alternatives and lists of ranks."""

import dataclasses
import math
import time
from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Any

from vitpar.limits import MAX_QUOTED_CHARS


def shown(text: object, around: int = 0) -> str:
    """Return `text` cut to MAX_QUOTED_CHARS characters, for messages. around: index that a long text is cut around."""
    words = str(text)
    if len(words) <= MAX_QUOTED_CHARS:
        return words
    kept = MAX_QUOTED_CHARS - 2  # room for an ellipsis on each side
    start = max(0, min(around - kept // 2, len(words) - kept))
    return f"{'…' * (start > 0)}{words[start : start + kept]}{'…' * (start + kept < len(words))}"


def literal(value: object) -> str:
    """Return the Python literal of `value` for an error message, cut like `shown`."""
    try:
        return shown(repr(value))
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"


def printable(text: str) -> str:
    """Return `text` with control characters, except newlines, and what UTF-8 cannot encode escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word closest to `word`, or an empty string if none is close.

    A long known word may also begin like `word`: vit_smal is closer to vit_small_patch16_224 than to t5_small.
    """
    if len(word) > MAX_QUOTED_CHARS:  # comparing takes time quadratic in its length
        return ""

    def likeness(other: str) -> tuple[float, float]:
        whole, begun = (SequenceMatcher(None, other[:end], word).ratio() for end in (None, len(word)))
        return max(whole, begun if len(word) > 3 and begun > 0.8 else 0.0), whole

    close = max(known, key=likeness, default="")
    return f" (did you mean '{close}'?)" if likeness(close)[0] >= 0.6 else ""


def short_repr(record: Any) -> str:
    """Return the repr of a dataclass, without the fields that have their defaults."""
    values = ((field.name, getattr(record, field.name), field.default) for field in dataclasses.fields(record))
    changed = [f"{name}={value!r}" for name, value, default in values if value != default]
    return f"{type(record).__name__}({', '.join(changed)})"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `4 ranks`, `2 micro-batches`, `3 strategies`."""
    plural = noun[:-1] + "ies" if noun.endswith("gy") else noun + ("es" if noun.endswith(("ch", "s")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def size(number: float) -> str:
    """Return a number of bytes with its unit: `1,360 GB`, `31.2 GB`, `640 MB`, `0.12 MB`."""
    unit, scale = ("GB", 1e9) if number >= 999.5e6 else ("MB", 1e6)
    value = number / scale
    return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:.3g} {unit}"  # .3g would write 1e+03


def either(options: Iterable[object]) -> str:
    """Return alternatives: `2`, `2 or 3`, `2, 3 or 6`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def ranks(numbers: Iterable[int], noun: str = "rank") -> str:
    """Return a list of ranks, or of another noun: `rank 3`, `ranks 0 and 2`, `ranks 0-2, 5 and 7`."""
    parts: list[str] = []
    run: list[int] = []
    ordered = sorted(numbers)
    for number, following in zip(ordered, [*ordered[1:], None], strict=True):
        run.append(number)
        if following != number + 1:
            parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
            run = []
    *others, last = parts
    noun = noun if len(ordered) == 1 else f"{noun}s"
    return f"{noun} {', '.join(others)} and {last}" if others else f"{noun} {last}"


def closest(values: Iterable[int], wanted: int, most: int = 3) -> list[int]:
    """Return up to `most` of `values` that are nearest to `wanted`, in ascending order."""
    return sorted(sorted(values, key=lambda value: abs(value - wanted))[:most])


def divisors(number: int) -> list[int]:
    """Return every divisor of `number` (1 or more), in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def log_line(text: str) -> str:
    """Return a line of a run's log.txt: date, local time and `text`."""
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"


def rough_duration(seconds: float) -> str:
    """Return a duration in few characters: `12 s`, `5 min`, `3 h`, `40 d`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
