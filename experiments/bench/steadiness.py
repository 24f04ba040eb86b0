"""Whether a series of measurements is flat: windows, and a slope with its error."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slope:
    """Total rise of values from first to last, relative to their median, and its standard error."""

    rise: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Slope:
        """The least-squares line through at least three values, whose residuals are taken to be independent."""
        count = len(values)
        centre, mean = (count - 1) / 2, statistics.fmean(values)
        spread = sum((x - centre) ** 2 for x in range(count))
        slope = sum((x - centre) * (y - mean) for x, y in enumerate(values)) / spread
        residual = sum((y - mean - slope * (x - centre)) ** 2 for x, y in enumerate(values)) / (count - 2)
        scale = (count - 1) / statistics.median(values)
        return cls(slope * scale, (residual / spread) ** 0.5 * scale)

    def text(self) -> str:
        """`+0.41 % ± 0.32 %`."""
        return f"{100 * self.rise:+.2f} % ± {100 * self.error:.2f} %"


def windows(values: Sequence[float], size: int) -> list[list[float]]:
    """In a row, `size` each; what is left over goes to none."""
    return [list(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
