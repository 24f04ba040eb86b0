"""Predictions beside measurements, and how far they are apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitpar.planner.cost.price import Price
from vitpar.planner.measure.steps import Measured
from vitpar.planner.profile.correction import Evidence

COMPUTING = ("forward", "backward", "optimizer", "uneven", "other")
SENDING = ("tensor", "gather", "gradients", "redistribution")
"""Parts of a step."""


@dataclass(frozen=True)
class Row:
    """One plan, as predicted and as measured. pace: of the profiles that it was predicted with, 0 where that is not
    known."""

    price: Price
    measured: Measured
    pace: float = 0.0

    @property
    def paces(self) -> tuple[float, ...]:
        """How much longer the cores took around each step than when they were profiled; 1 where that is not known."""
        known = self.pace and self.measured.paces
        return tuple(pace / self.pace for pace in self.measured.paces) if known else (1.0,) * len(self.measured.seconds)

    @property
    def seconds(self) -> float:
        """Of a step at the profiled pace: the median."""
        return statistics.median(s / pace for s, pace in zip(self.measured.seconds, self.paces, strict=True))

    @property
    def clocked(self) -> float:
        """Of a step at whatever pace: the median."""
        return statistics.median(self.measured.seconds)

    @property
    def memory(self) -> int | None:
        """Bytes of the fullest rank, measured; None where the system does not tell."""
        known = [size for size in self.measured.memory if size is not None]
        return max(known) if known else None

    @property
    def time_error(self) -> float:
        """How much the prediction is above the measurement, as a part of it."""
        return self.price.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The same of memory."""
        return None if self.memory is None else self.price.memory_bytes / self.memory - 1

    @property
    def evidence(self) -> Evidence:
        """What it says about the profiles. Waiting for other stages is as much computing and sending as the rest."""
        time, memory = self.price.time, self.memory
        computing = sum(time.get(what, 0.0) for what in COMPUTING)
        sending = sum(time.get(what, 0.0) for what in SENDING)
        share = self.price.seconds / (computing + sending)
        return Evidence(
            computing * share,
            sending * share,
            self.seconds,
            None if memory is None else (self.price.memory_bytes, float(memory)),
        )

    def to_json(self) -> dict[str, Any]:
        """Raw figures."""
        plan = self.price.plan
        return {
            "strategy": str(plan),
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "batch_size": self.price.batch_size,
            "predicted_seconds": self.price.seconds,
            "measured_seconds": list(self.measured.seconds),
            "paces": list(self.paces),
            "predicted_memory_bytes": self.price.memory_bytes,
            "measured_memory_bytes": list(self.measured.memory),
            "predicted_breakdown_seconds": dict(self.price.time),
        }


@dataclass(frozen=True)
class Accuracy:
    """Of several plans. time, memory: mean and largest absolute error; memory None where it is not known. clocked: as
    time, but of what the clock says, whatever the pace. pace: of the cores, in the mean, as in `Row.paces`. rank: how
    alike the orders by time are (Spearman's correlation), 1 for equal. chosen: how much slower the plan that is
    predicted to be the fastest is than the one that is."""

    time: tuple[float, float]
    clocked: tuple[float, float]
    pace: float
    memory: tuple[float, float] | None
    rank: float
    chosen: float


def accuracy(rows: Sequence[Row]) -> Accuracy:
    """Of one row at least."""
    times = [abs(row.time_error) for row in rows]
    clocked = [abs(row.price.seconds / row.clocked - 1) for row in rows]
    sizes = [abs(error) for row in rows if (error := row.memory_error) is not None]
    fastest = min(row.seconds for row in rows)
    return Accuracy(
        time=(statistics.mean(times), max(times)),
        clocked=(statistics.mean(clocked), max(clocked)),
        pace=statistics.mean(statistics.mean(row.paces) for row in rows),
        memory=(statistics.mean(sizes), max(sizes)) if sizes else None,
        rank=spearman([row.price.seconds for row in rows], [row.seconds for row in rows]),
        chosen=min(rows, key=lambda row: row.price.seconds).seconds / fastest - 1,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of the ranks of two equally long series; 1 for fewer than two values."""
    if len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1:
        return 1.0
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]
