"""Intervals of a run: lengths in steps, epochs, samples, percent of the run, or minutes."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitpar.limits import MAX_COUNT
from vitpar.text import shown

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Unit = Literal["steps", "epochs", "samples", "percent", "minutes"]
UNITS: tuple[Unit, ...] = get_args(Unit)
_GIVEN = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(%|[a-z]*)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Interval:
    """A part of a run. In recipes it is a whole number of steps, a share of the run below 1, or text with a unit.

    >>> Interval.of("5 epochs").steps(samples=1000, batch_size=100, total=300)
    50
    """

    number: float
    """Length, at least 0."""
    unit: Unit = "steps"
    """Unit of the length."""

    @classmethod
    def of(cls, given: object) -> Interval:
        """Return the interval that 500, 0.1, `500 steps`, `5 epochs`, `1e6 samples` or `10 %` is. Raises ValueError."""
        if isinstance(given, cls):
            return given
        word, number = "", math.nan
        with suppress(ValueError, OverflowError):
            if isinstance(given, int | float) and not isinstance(given, bool):
                number = float(given)
            elif isinstance(given, str) and len(given) <= 40 and (found := _GIVEN.fullmatch(given)):
                word = found[2].lower()
                number = float(found[1])
        unit = next((unit for unit in UNITS if word in (unit, unit.removesuffix("s"))), None)
        if not word:
            number, unit = (100 * number, "percent") if 0 < number < 1 else (number, "steps")
        elif word == "%":
            unit = "percent"
        number = float(f"{number:.12g}")  # as `str` writes it: a recipe that is written and read again is the same
        whole = unit not in ("steps", "samples") or number % 1 == 0
        if unit is None or not 0 <= number <= (100 if unit == "percent" else MAX_COUNT) or not whole:
            raise ValueError(
                f"'{shown(given)}' is no interval: give steps (500), a share of the run (0.1, 10 %), or text such as "
                "5 epochs, 1e6 samples, 20 minutes"
            )
        return cls(number, unit)

    def in_steps(self) -> Interval:
        """Return this interval, or raise ValueError if it is not known how many steps it has."""
        if self.unit == "minutes":
            raise ValueError(f"{self} have no known number of steps: give steps, epochs, samples or a share of the run")
        return self

    def scaled(self, factor: Fraction) -> Interval:
        """Return this interval for steps that are `1 / factor` times as large: only steps change, rounded up."""
        return Interval(math.ceil(self.number * factor), "steps") if self.unit == "steps" else self

    def steps(self, *, samples: int, batch_size: int, total: int) -> int:
        """Return the length in steps, at least 1 unless it is 0. total: steps of the run."""
        self.in_steps()
        steps = {
            "steps": self.number,
            "epochs": self.number * samples / batch_size,
            "samples": self.number / batch_size,
            "percent": self.number * total / 100,
        }[self.unit]
        return max(1, round(steps)) if self.number else 0

    def __str__(self) -> str:
        number = f"{self.number:.12g}"
        if self.unit == "percent":
            return f"{number} %"
        return f"{number} {self.unit if self.number != 1 else self.unit.removesuffix('s')}"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            cls.of, serialization=core_schema.to_string_ser_schema(when_used="always")
        )


NOTHING, TEN_STEPS, EPOCH = Interval(0.0), Interval(10.0), Interval(1.0, "epochs")
