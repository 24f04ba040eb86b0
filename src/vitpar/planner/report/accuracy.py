"""Comparison of predictions with measurements, and corrections of profiles that follow from measured plans.

Factors that bring predictions nearer to measurements are stored in the profiles and named there. Nothing is corrected
without being asked, since a hidden error is never fixed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vitpar.planner.cost.price import Price
from vitpar.planner.measure.steps import Measured
from vitpar.planner.profile.profiles import Hardware, ModelProfile

COMPUTING = ("forward", "backward", "optimizer", "uneven", "other")
SENDING = ("tensor", "gather", "gradients", "redistribution")
"""Parts of a step."""
BUSY = 0.1
"""Share of the cores that other programs may use before measured steps are not to be relied on."""
LEAST, MOST = 0.2, 5.0
"""Factors beyond these mean that something else is wrong."""


@dataclass(frozen=True)
class Evidence:
    """One plan. computing, sending: seconds of a step, as predicted; together all of it. seconds: as measured. memory:
    bytes of the fullest rank, predicted and measured, None where that is not known."""

    computing: float
    sending: float
    seconds: float
    memory: tuple[float, float] | None


@dataclass(frozen=True)
class AccuracyRow:
    """One plan, as predicted and as measured. pace: of the profiles that it was predicted with, 0 where that is not
    known."""

    price: Price
    measured: Measured
    pace: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a step at the profiled speed of the cores: the median of the runs' medians."""
        return statistics.median(run.middle(self.pace) for run in self.measured.runs)

    @property
    def clocked(self) -> float:
        """Seconds of a step by the clock: the median of the runs' medians."""
        return statistics.median(run.middle(0.0) for run in self.measured.runs)

    @property
    def slowdown(self) -> float:
        """How much longer the cores took for the same work than when they were profiled; 1 where that is not known."""
        paces = [pace for run in self.measured.runs for pace in run.paces]
        return statistics.mean(paces) / self.pace if self.pace and paces else 1.0

    @property
    def repeat(self) -> float | None:
        """How much longer the second run took than the first; None before it has."""
        first, *more = (run.middle(self.pace) for run in self.measured.runs)
        return more[0] / first - 1 if more else None

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
        """Relative error of the predicted memory."""
        return None if self.memory is None else self.price.memory_bytes / self.memory - 1

    @property
    def evidence(self) -> Evidence:
        """Return what the measurement says about the profiles. Waiting for other stages counts as computing and sending
        in the same proportion."""
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

    def to_json(self) -> dict[str, object]:
        """Raw figures."""
        plan = self.price.plan
        return {
            "strategy": str(plan),
            "schedule": plan.schedule,
            "microbatches": plan.microbatches,
            "batch_size": self.price.batch_size,
            "predicted_seconds": self.price.seconds,
            "measured_seconds": self.seconds,
            "clocked_seconds": self.clocked,
            "runs": [
                {"seconds": list(run.seconds), "paces": list(run.paces), "others": run.others}
                for run in self.measured.runs
            ],
            "predicted_memory_bytes": self.price.memory_bytes,
            "measured_memory_bytes": list(self.measured.memory),
            "predicted_breakdown_seconds": dict(self.price.time),
        }


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of predictions over several plans."""

    time: tuple[float, float]
    """Mean and largest absolute error of time, at the profiled speed of the cores."""
    clocked: tuple[float, float]
    """Mean and largest absolute error of time by the clock."""
    slowdown: float
    """Mean slow-down of the cores since profiling; 1 for none."""
    repeat: tuple[float, float] | None
    """Mean and largest difference between first and second runs, which limits how accurate a prediction can be known to
    be. None unless all plans ran twice."""
    memory: tuple[float, float] | None
    """Mean and largest absolute error of memory; None where it is not known."""
    rank: float
    """Spearman's correlation of the orders by time; 1 for equal orders."""
    chosen: float
    """Relative time by which the plan predicted to be fastest is slower than the fastest."""


def others_used(rows: Sequence[AccuracyRow]) -> float | None:
    """The share of the cores that other programs used while plans were measured, in the mean of all runs; None where
    it is not known."""
    known = [run.others for row in rows for run in row.measured.runs if run.others is not None]
    return statistics.fmean(known) if known else None


def accuracy(rows: Sequence[AccuracyRow]) -> Accuracy:
    """Return the accuracy of the predictions in `rows`, at least one."""
    times = [abs(row.time_error) for row in rows]
    clocked = [abs(row.price.seconds / row.clocked - 1) for row in rows]
    sizes = [abs(error) for row in rows if (error := row.memory_error) is not None]
    repeats = [abs(repeat) for row in rows if (repeat := row.repeat) is not None]
    fastest = min(row.seconds for row in rows)
    return Accuracy(
        time=(statistics.mean(times), max(times)),
        clocked=(statistics.mean(clocked), max(clocked)),
        slowdown=statistics.mean(row.slowdown for row in rows),
        repeat=(statistics.mean(repeats), max(repeats)) if len(repeats) == len(rows) else None,
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


@dataclass(frozen=True)
class Correction:
    """computing, sending: by what predicted seconds are multiplied. memory_bytes: what every rank needs besides what is
    counted. plans: how many it comes from."""

    computing: float
    sending: float
    memory_bytes: int
    plans: int

    def __str__(self) -> str:
        return (
            f"computation x {self.computing:.3f}, communication x {self.sending:.3f}, "
            f"{self.memory_bytes / 1e6:.1f} MB more per rank, from {self.plans} plans"
        )

    def _said(self, measured: dict[str, str]) -> dict[str, str]:
        before = f"{measured['corrected']}; then " if "corrected" in measured else ""
        return {**measured, "corrected": f"{before}{self}"}

    def of(self, hardware: Hardware, model: ModelProfile) -> tuple[Hardware, ModelProfile]:
        """Both profiles with all seconds multiplied; `measured` says so."""
        reserved = hardware.reserved_bytes + self.memory_bytes
        return (
            hardware.slower(self.computing, self.sending).model_copy(
                update={"reserved_bytes": reserved, "measured": self._said(hardware.measured)}
            ),
            model.slower(self.computing, self.sending).model_copy(update={"measured": self._said(model.measured)}),
        )


def correction(evidence: Sequence[Evidence]) -> Correction:
    """The factors with the least squares of the relative errors; memory by the median. One factor for all where plans
    do not tell computing and sending apart."""
    cc = cs = ss = c = s = 0.0
    for one in evidence:
        x, y = one.computing / one.seconds, one.sending / one.seconds
        cc, cs, ss, c, s = cc + x * x, cs + x * y, ss + y * y, c + x, s + y
    determinant = cc * ss - cs * cs
    both = (c + s) / (cc + 2 * cs + ss)
    factors = both, both
    if determinant > 1e-6 * cc * ss:
        apart = (ss * c - cs * s) / determinant, (cc * s - cs * c) / determinant
        if all(LEAST <= factor <= MOST for factor in apart):
            factors = apart
    differences = sorted(measured - predicted for predicted, measured in (e.memory for e in evidence if e.memory))
    more = differences[len(differences) // 2] if differences else 0.0
    computing, sending = (min(MOST, max(LEAST, factor)) for factor in factors)
    return Correction(computing, sending, max(0, round(more)), len(evidence))
