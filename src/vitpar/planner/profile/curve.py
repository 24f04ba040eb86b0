"""Durations measured over many sizes, as a function of the size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Self

from pydantic import Field, field_validator

from vitpar.errors import shown
from vitpar.limits import MAX_AMOUNT
from vitpar.planner.profile.record import Amount, Measure, Record, Seconds
from vitpar.records import Many


class Timing(Record):
    """One measured point.

    size: bytes, or FLOPs, as the curve says. seconds: the median. spread: half the distance between the quartiles over
    the median. samples: how many were taken. skew: seconds that the slowest process takes more than the others.
    scratch: bytes that it takes meanwhile, besides what it is given and gives.
    """

    size: Amount
    seconds: Seconds
    spread: Measure
    samples: Amount
    skew: Measure = 0.0
    scratch: int = Field(default=0, ge=0, le=MAX_AMOUNT)

    def slower(self, factor: float) -> Self:
        """The same, with all seconds times `factor`."""
        return self.model_copy(update={"seconds": self.seconds * factor, "skew": self.skew * factor})


class Curve(Record):
    """Seconds over sizes: straight between the measured points, and never falling."""

    timings: Many[Timing] = Field(min_length=1)

    @field_validator("timings")
    @classmethod
    def _in_order(cls, timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
        sizes = [timing.size for timing in timings]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"sizes {shown(sizes)} do not rise: sort them and give each once")
        return timings

    def slower(self, factor: float) -> Self:
        """The same, with all seconds times `factor`."""
        # Made anew: a copy would keep what the curve has remembered.
        return type(self)(**{**dict(self), "timings": tuple(timing.slower(factor) for timing in self.timings)})

    def seconds(self, size: float) -> float:
        """How long `size` takes: below the smallest measured size as long as that, above the largest at the rate of
        the last two."""
        sizes, rising = self._points
        if size <= sizes[0]:
            return rising[0]
        if size <= sizes[-1]:
            right = bisect_left(sizes, size)
            share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            return rising[right - 1] + share * (rising[right] - rising[right - 1])
        # A noisy last step may be flat, but more work is not free.
        slope = rising[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = max(slope / 2, (rising[-1] - rising[-2]) / (sizes[-1] - sizes[-2]))
        return rising[-1] + slope * (size - sizes[-1])

    def skew(self, size: float) -> float:
        """Seconds by which the slowest process is later than the others: the part that it was of the measured size
        nearest to `size`."""
        nearest = min(self.timings, key=lambda timing: abs(timing.size - size))
        return nearest.skew / nearest.seconds * self.seconds(size)

    def scratch(self, size: float) -> float:
        """Bytes that `size` takes meanwhile, besides what is given and comes out: the part that it was of the measured
        size nearest to it."""
        nearest = min(self.timings, key=lambda timing: abs(timing.size - size))
        return nearest.scratch / nearest.size * size

    @cached_property
    def least(self) -> float:
        """Seconds that a unit of size takes at least, at any size."""
        sizes, rising = self._points
        tail = self.seconds(2 * sizes[-1]) - rising[-1]
        return min(tail / sizes[-1], *(seconds / size for size, seconds in zip(sizes, rising, strict=True)))

    @property
    def latency(self) -> float:
        """Seconds that even nothing takes, by the straight line nearest to the points (`fit`)."""
        return self._line[0]

    @property
    def rate(self) -> float:
        """Size a second of more and more, by the same line; infinite where size does not matter."""
        return 1 / self._line[1] if self._line[1] else float("inf")

    @cached_property
    def _points(self) -> tuple[list[int], list[float]]:
        return [t.size for t in self.timings], list(accumulate((t.seconds for t in self.timings), max))

    @cached_property
    def _line(self) -> tuple[float, float]:
        return fit([t.size for t in self.timings], [t.seconds for t in self.timings])


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(latency, seconds a unit) of the line nearest to the points, neither below 0.

    Least squares of the relative errors: absolute ones would let the largest sizes say everything.
    """
    w = wx = wxx = wy = wxy = 0.0
    for x, y in zip(sizes, seconds, strict=True):
        weight = 1 / y**2
        w, wx, wxx, wy, wxy = w + weight, wx + weight * x, wxx + weight * x * x, wy + weight * y, wxy + weight * x * y
    determinant = w * wxx - wx * wx
    if len(sizes) > 1 and determinant > 0:
        latency, slope = (wxx * wy - wx * wxy) / determinant, (w * wxy - wx * wy) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
        if slope < 0:
            return wy / w, 0.0
    return 0.0, wxy / wxx
