"""Sparkline: the course of a number over the steps of a run, in one line of text."""

from __future__ import annotations

from math import isfinite

COLUMNS = 40
"""Characters of a sparkline at most."""
BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters from the smallest to the largest value."""
ASCII = "_.-~=+*#"
"""Characters for a terminal that has no `BLOCKS`."""


class Sparkline:
    """Means of a number over equal parts of a run.

    steps: steps of the complete run.
    """

    def __init__(self, steps: int) -> None:
        self._steps = max(1, steps)
        self._sums = [0.0] * COLUMNS
        self._counts = [0] * COLUMNS
        self._first: float | None = None
        self._last: float | None = None

    def add(self, step: int, value: float | None) -> None:
        """Record the value at `step`, from 1. A missing or infinite one is left out."""
        if value is None or not isfinite(value):
            return
        column = min(COLUMNS - 1, (step - 1) * COLUMNS // self._steps)
        self._sums[column] += value
        self._counts[column] += 1
        self._first = value if self._first is None else self._first
        self._last = value

    def words(self, encoding: str = "utf-8", form: str = ".4f") -> str | None:
        """Return the line with the first and the last value; None with less than two columns of values.

        encoding: of the output; one without `BLOCKS` gets `ASCII`.
        form: format of the two values.
        """
        means = [total / count for total, count in zip(self._sums, self._counts, strict=True) if count]
        if len(means) < 2:
            return None
        try:
            BLOCKS.encode(encoding)
            levels = BLOCKS
        except (UnicodeEncodeError, LookupError):
            levels = ASCII
        least, span = min(means), max(means) - min(means)
        places = [round((mean - least) / span * (len(levels) - 1)) if span else 0 for mean in means]
        return f"{''.join(levels[place] for place in places)}  {self._first:{form}} to {self._last:{form}}"
