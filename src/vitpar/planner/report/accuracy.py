"""Comparison of predictions with measurements, and corrections of profiles that follow from measured plans.

A correction stores its factors in the profiles and says so there. Nothing is corrected unless the user asks for it,
since a hidden error is never fixed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitpar.errors import PlannerError
from vitpar.planner.cost.price import Price
from vitpar.planner.measure.steps import Measured, PlanSteps
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.text import shown

COMPUTING = ("forward", "backward", "teacher", "optimizer", "uneven", "other")
"""Parts of a step's time (`Price.time`) that are computing."""
SENDING = ("tensor", "gather", "gradients", "redistribution")
"""Parts of a step's time that are communication."""
BUSY = 0.1
"""Share of the cores used by other programs above which measured steps are unreliable."""
LEAST, MOST = 0.2, 5.0
"""Limits of correction factors; a factor outside them means that something else is wrong."""


@dataclass(frozen=True)
class AccuracyRow:
    """One plan with its prediction and measurement."""

    price: Price
    """The prediction."""
    measured: Measured
    """The measurement."""
    pace: float = 0.0
    """Seconds of `CpuSpeedProbe` while the profiles were measured; 0 if not known."""

    @property
    def seconds(self) -> float:
        """Measured seconds per step, scaled to the cores' speed during profiling: the median of the runs' medians."""
        return statistics.median(run.middle(self.pace) for run in self.measured.runs)

    @property
    def clocked(self) -> float:
        """Measured seconds per step by the clock: the median of the runs' medians."""
        return statistics.median(run.middle(0.0) for run in self.measured.runs)

    @property
    def slowdown(self) -> float:
        """Time of the cores for the same work, relative to that during profiling; 1 if not known."""
        paces = [pace for run in self.measured.runs for pace in run.paces]
        return statistics.mean(paces) / self.pace if self.pace and paces else 1.0

    @property
    def repeat(self) -> float | None:
        """Relative difference of the second run's time to the first's; None with a single run."""
        first, *more = (run.middle(self.pace) for run in self.measured.runs)
        return more[0] / first - 1 if more else None

    @property
    def memory(self) -> int | None:
        """Measured bytes of the fullest rank; None if the system does not report them."""
        known = [size for size in self.measured.memory if size is not None]
        return max(known) if known else None

    @property
    def time_error(self) -> float:
        """Relative error of the predicted time: positive if the prediction is too slow."""
        return self.price.seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory; None if not measured."""
        return None if self.memory is None else self.price.memory_bytes / self.memory - 1

    @property
    def parts(self) -> tuple[float, float]:
        """Predicted times of computing and of communication, relative to the measured time of the step."""
        # Waiting for other stages is distributed over both in proportion to them.
        computing, sending = (sum(self.price.time.get(what, 0.0) for what in kind) for kind in (COMPUTING, SENDING))
        share = self.price.seconds / (computing + sending) / self.seconds
        return computing * share, sending * share

    def to_json(self) -> dict[str, object]:
        """Return the unrounded numbers as JSON, in seconds and bytes."""
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


def measured_before(prices: Sequence[Price], rows: Any) -> list[Measured]:
    """Return the measurements in `rows`, made by `AccuracyRow.to_json` for the first of these predictions.

    Raises PlannerError if `rows` are of other plans, or damaged.
    """
    measured = list[Measured]()
    for number, (price, row) in enumerate(zip(prices, rows, strict=False), start=1):
        try:
            of = row["strategy"], row["schedule"], row["microbatches"], row["batch_size"]
            runs = tuple(PlanSteps(_numbers(r["seconds"]), _numbers(r["paces"]), r["others"]) for r in row["runs"])
            memory = tuple(None if size is None else int(size) for size in row["measured_memory_bytes"])
            if not (runs and memory) or not all(_usable(run) for run in runs):
                raise ValueError
            measured.append(Measured(runs, memory))
        except (KeyError, TypeError, ValueError) as error:
            raise PlannerError(
                f"cannot resume, row {number} is damaged ({type(error).__name__}): leave out --resume"
            ) from None
        plan = price.plan
        if of != (str(plan), plan.schedule, plan.microbatches, price.batch_size):
            raise PlannerError(
                f"cannot resume, row {number} is of {shown(of[0])}, not of '{plan}': give the same plans"
            )
    return measured


def _usable(run: PlanSteps) -> bool:
    """Return whether a run has positive, finite numbers, and a pace for each step or none."""
    whole = len(run.paces) in (0, len(run.seconds)) and len(run.seconds) > 0
    return whole and all(math.isfinite(x) and x > 0 for x in (*run.seconds, *run.paces))


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


def others_used(rows: Sequence[AccuracyRow]) -> float | None:
    """Return the mean share of the cores that other programs used during the runs, 0 to 1; None if not known."""
    known = [run.others for row in rows for run in row.measured.runs if run.others is not None]
    return statistics.fmean(known) if known else None


def accuracy(rows: Sequence[AccuracyRow]) -> Accuracy:
    """Return the accuracy of the predictions in `rows`, at least one."""

    def mean_and_largest(errors: Iterable[float | None]) -> tuple[float, float]:
        sizes = [abs(error) for error in errors if error is not None] or [0.0]
        return statistics.mean(sizes), max(sizes)

    return Accuracy(
        time=mean_and_largest(row.time_error for row in rows),
        clocked=mean_and_largest(row.price.seconds / row.clocked - 1 for row in rows),
        slowdown=statistics.mean(row.slowdown for row in rows),
        repeat=mean_and_largest(row.repeat for row in rows) if all(row.repeat is not None for row in rows) else None,
        memory=mean_and_largest(row.memory_error for row in rows) if any(row.memory for row in rows) else None,
        rank=spearman([row.price.seconds for row in rows], [row.seconds for row in rows]),
        chosen=min(rows, key=lambda row: row.price.seconds).seconds / min(row.seconds for row in rows) - 1,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's correlation of two equally long series; 1 for fewer than two values or a constant series."""
    if len(a) < 2 or len(set(a)) == 1 or len(set(b)) == 1:
        return 1.0
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value, from 0; equal values share their mean rank."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]


@dataclass(frozen=True)
class Correction:
    """Correction of profiles by measured plans."""

    computing: float
    """Factor on all profiled seconds of computing."""
    sending: float
    """Factor on all profiled seconds of communication."""
    memory_bytes: int
    """Bytes per rank that predictions lack."""
    plans: int
    """Number of plans that it is derived from."""

    def __str__(self) -> str:
        return (
            f"computation x {self.computing:.3f}, communication x {self.sending:.3f}, "
            f"{self.memory_bytes / 1e6:.1f} MB more per rank, from {self.plans} plans"
        )

    def _said(self, measured: dict[str, str]) -> dict[str, str]:
        """Return a profile's field `measured` with this correction added to earlier ones."""
        before = f"{measured['corrected']}; then " if "corrected" in measured else ""
        return {**measured, "corrected": f"{before}{self}"}

    def of(self, hardware: Hardware, model: ModelProfile) -> tuple[Hardware, ModelProfile]:
        """Return corrected copies of both profiles, with the correction noted in their fields `measured`."""
        reserved = hardware.reserved_bytes + self.memory_bytes
        return (
            hardware.slower(self.computing, self.sending).model_copy(
                update={"reserved_bytes": reserved, "measured": self._said(hardware.measured)}
            ),
            model.slower(self.computing, self.sending).model_copy(update={"measured": self._said(model.measured)}),
        )


def correction(parts: Sequence[tuple[float, float]], missing: Sequence[float]) -> Correction:
    """Return the correction that fits measured plans best.

    Its factors minimize the sum of squared relative errors of time. If the plans do not distinguish computing from
    communication, both get the same factor. Memory is corrected by the median of `missing`, upwards only.

    parts: `AccuracyRow.parts` of each plan.
    missing: bytes that the fullest rank took more than predicted, where they are known.
    """
    x, y = np.array(parts).T
    factors = np.full(2, (x + y).sum() / ((x + y) ** 2).sum())
    # Normal equations of: sum over plans of (f_computing · x + f_sending · y - 1)².
    products = np.array([[x @ x, x @ y], [x @ y, y @ y]])
    # A determinant near 0 means that x and y are proportional over the plans: the two factors are not determined.
    if np.linalg.det(products) > 1e-6 * (x @ x) * (y @ y):
        apart = np.linalg.solve(products, [x.sum(), y.sum()])
        factors = apart if ((apart >= LEAST) & (apart <= MOST)).all() else factors
    computing, sending = np.clip(factors, LEAST, MOST).tolist()
    more = statistics.median_high(missing) if missing else 0.0
    return Correction(computing, sending, max(0, round(more)), len(parts))
