"""Trend of a series of measurements: windows, and a least-squares slope with its standard error."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slope:
    """Rise of a series by its least-squares line."""

    rise: float
    """Rise of the line from the first value to the last, relative to the median."""
    error: float
    """Standard error of `rise`."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Slope:
        """Fit a line to at least three values, assuming independent residuals."""
        count = len(values)
        centre, mean = (count - 1) / 2, statistics.fmean(values)
        spread = sum((x - centre) ** 2 for x in range(count))
        slope = sum((x - centre) * (y - mean) for x, y in enumerate(values)) / spread
        residual = sum((y - mean - slope * (x - centre)) ** 2 for x, y in enumerate(values)) / (count - 2)
        scale = (count - 1) / statistics.median(values)
        return cls(slope * scale, (residual / spread) ** 0.5 * scale)

    def text(self) -> str:
        """Return text such as `+0.41 % ± 0.32 %`."""
        return f"{100 * self.rise:+.2f} % ± {100 * self.error:.2f} %"


def windows(values: Sequence[float], size: int) -> list[list[float]]:
    """Split `values` into consecutive windows of `size` values each; an incomplete last window is dropped."""
    return [list(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
