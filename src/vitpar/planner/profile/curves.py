"""Measured points of profiles, and curves through them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Self

from pydantic import Field, field_validator

from vitpar.limits import MAX_AMOUNT
from vitpar.planner.profile.record import Amount, Measure, ProfileRecord, Seconds
from vitpar.text import shown


class Timing(ProfileRecord):
    """One measured point of a curve."""

    size: Amount
    """Size in the unit of the curve: bytes, FLOPs, rows or elements."""
    seconds: Seconds
    """Median over the readings."""
    spread: Measure
    """Half the interquartile range, relative to the median."""
    samples: Amount
    """Number of readings."""
    skew: Measure = 0.0
    """Seconds by which the slowest process exceeds the mean of all processes."""
    scratch: int = Field(default=0, ge=0, le=MAX_AMOUNT)
    """Transient bytes, apart from inputs and outputs."""

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        return self.model_copy(update={"seconds": self.seconds * factor, "skew": self.skew * factor})

    def until_last(self) -> Self:
        """Return a copy whose seconds are those of the slowest process, without skew."""
        return self.model_copy(update={"seconds": self.seconds + self.skew, "skew": 0.0})


def exact(points: Iterable[tuple[int, float]]) -> tuple[Timing, ...]:
    """Return (size, seconds) pairs that were computed, not measured, as timings."""
    return tuple(Timing(size=size, seconds=seconds, spread=0, samples=1) for size, seconds in points)


class Curve(ProfileRecord):
    """Seconds as a function of size: linear between the measured points, and never falling."""

    timings: tuple[Timing, ...] = Field(min_length=1)
    """Points, by rising size."""

    @field_validator("timings")
    @classmethod
    def _in_order(cls, timings: tuple[Timing, ...]) -> tuple[Timing, ...]:
        sizes = [timing.size for timing in timings]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"sizes {shown(sizes)} are not ascending: sort them and give each once")
        return timings

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        return self._with(tuple(timing.slower(factor) for timing in self.timings))

    def until_last(self) -> Self:
        """Return a copy whose seconds are those of the slowest process, without skew."""
        return self._with(tuple(timing.until_last() for timing in self.timings))

    def _with(self, timings: tuple[Timing, ...]) -> Self:
        """Return a copy with other points."""
        # A new object of the fields alone: model_copy and dict() would also copy what cached properties hold.
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**kept, "timings": timings})

    def seconds(self, size: float) -> float:
        """Return the seconds for `size`.

        Below the smallest measured size they are constant; above the largest they extend the line of the last two.
        """
        sizes, rising = self._points
        if size <= sizes[0]:
            return rising[0]
        if size <= sizes[-1]:
            right = bisect_left(sizes, size)
            share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            return rising[right - 1] + share * (rising[right] - rising[right - 1])
        # Noise can make the last two points flat, but more work is never free: assume at least half the mean time per
        # unit of size.
        slope = rising[-1] / sizes[-1]
        if len(sizes) > 1:
            slope = max(slope / 2, (rising[-1] - rising[-2]) / (sizes[-1] - sizes[-2]))
        return rising[-1] + slope * (size - sizes[-1])

    def skew(self, size: float) -> float:
        """Return the seconds by which the slowest process exceeds the mean at `size`.

        The share of the time is that of the nearest measured size.
        """
        nearest = min(self.timings, key=lambda timing: abs(timing.size - size))
        return nearest.skew / nearest.seconds * self.seconds(size)

    def scratch(self, size: float) -> float:
        """Return the transient bytes at `size`, in proportion to those of the nearest measured size."""
        nearest = min(self.timings, key=lambda timing: abs(timing.size - size))
        return nearest.scratch / nearest.size * size

    @cached_property
    def least(self) -> float:
        """Return the smallest seconds per unit of size at any size; a lower bound for the search."""
        # Piecewise linear: the ratio is smallest at a measured point or, above them all, in the slope of the tail.
        sizes, rising = self._points
        tail = self.seconds(2 * sizes[-1]) - rising[-1]
        return min(tail / sizes[-1], *(seconds / size for size, seconds in zip(sizes, rising, strict=True)))

    @property
    def latency(self) -> float:
        """Return the seconds at size 0, by the line that `fit` returns."""
        return self._line[0]

    @property
    def rate(self) -> float:
        """Return the asymptotic size per second, by the line that `fit` returns; infinite if the line is flat."""
        return 1 / self._line[1] if self._line[1] else float("inf")

    @cached_property
    def _points(self) -> tuple[list[int], list[float]]:
        return [t.size for t in self.timings], list(accumulate((t.seconds for t in self.timings), max))

    @cached_property
    def _line(self) -> tuple[float, float]:
        return fit([t.size for t in self.timings], [t.seconds for t in self.timings])


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (latency, seconds per unit of size) of the line that fits the points best; neither is negative.

    Minimises the squares of relative errors: absolute ones would be dominated by the largest sizes.
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
