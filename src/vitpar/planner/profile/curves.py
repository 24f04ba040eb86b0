"""Records of which profiles consist: JSON files that are checked key by key when read, measured points, and curves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import ConfigDict, Field, field_validator

from vitpar import records
from vitpar.errors import PlannerError
from vitpar.io import read_json, write_text
from vitpar.limits import MAX_AMOUNT, MAX_MEASURE, MAX_RANKS
from vitpar.records import first_wrong
from vitpar.text import shown

Seconds = Annotated[float, Field(ge=1 / MAX_MEASURE, le=MAX_MEASURE)]
"""Positive seconds."""
Measure = Annotated[float, Field(ge=0, le=MAX_MEASURE)]
"""Seconds or any other measure that may be 0."""
Share = Annotated[float, Field(ge=1e-3, le=1)]
"""Part of a published rate that is reached, up to 1."""
Factor = Annotated[float, Field(ge=1, le=MAX_MEASURE)]
"""Slow-down, 1 or more."""
Rate = Annotated[float, Field(ge=1, le=1e18)]
"""Bytes or operations per second."""
Amount = Annotated[int, Field(ge=1, le=MAX_AMOUNT)]
"""Positive number of bytes, elements or operations."""
Ranks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
"""Number of ranks."""
Part = TypeVar("Part")
"""Part of a profile: a record, or several."""


class ProfileRecord(records.Record):
    """Base of all records in a profile: immutable, with finite numbers, unknown keys refused."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)


class Profile(ProfileRecord):
    """Base of the hardware and the model profile."""

    subject: ClassVar[str]
    """Name of the subcommand of ``vitpar profile``: hardware or model."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the profile in the JSON file `path`. Raises PlannerError, which names an invalid key."""
        try:
            return cls.model_validate(read_json(path))
        except OSError as error:
            raise PlannerError(
                f"cannot read the {cls.subject} profile {shown(path)}: {error.strerror}: make one with `vitpar profile "
                f"{cls.subject}`, or plan from a data sheet with --cluster 8xH100"
            ) from None
        except ValueError as error:
            wrong = f"{shown(path)} is not a {cls.subject} profile, {first_wrong(error)}"
            raise PlannerError(f"{wrong}: make one with `vitpar profile {cls.subject}`") from None

    def save(self, path: Path) -> None:
        """Write the profile as JSON, atomically: a reader sees the old file or the complete new one.

        Raises PlannerError.
        """
        try:
            write_text(path, self.model_dump_json(indent=1, by_alias=True) + "\n")
        except OSError as error:
            raise PlannerError(f"cannot write the {self.subject} profile {shown(path)}: {error.strerror}") from None


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

    def slower(self, factor: float) -> Self:
        """Return a copy with all seconds multiplied by `factor`."""
        return self.model_copy(update={"seconds": self.seconds * factor})


def each(part: Part, change: Callable[[Timing], Timing]) -> Part:
    """Return a copy of a part of a profile with `change` applied to all timings in it."""
    copied: Any = part
    if isinstance(part, Timing):
        copied = change(part)
    elif isinstance(part, tuple):
        copied = tuple(each(one, change) for one in part)
    elif isinstance(part, ProfileRecord):
        # A new object of the fields alone: model_copy would also copy what cached properties hold.
        copied = part.model_construct(**{name: each(getattr(part, name), change) for name in type(part).model_fields})
    return copied


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
        return each(self, lambda timing: timing.slower(factor))

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

    def nearest(self, size: float) -> Timing:
        """Return the timing of the measured size that is nearest to `size`."""
        return min(self.timings, key=lambda timing: abs(timing.size - size))

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
