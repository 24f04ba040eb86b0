"""Comparison of predictions with measurements, and corrections of profiles that follow from measured plans.

A correction stores its factors in the profiles and says so there. Nothing is corrected unless the user asks for it,
since a hidden error is never fixed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitpar.planner.cost.price import Price
from vitpar.planner.measure.steps import Measured
from vitpar.planner.profile.profiles import Hardware, ModelProfile
from vitpar.strategy.plan_json import plan_to_json

COMPUTING = ("forward", "backward", "teacher", "optimizer", "other")
"""Parts of a step's time (`Price.time`) that are computing."""
SENDING = ("tensor", "gather", "gradients", "redistribution")
"""Parts of a step's time that are communication."""
LEAST, MOST = 0.2, 5.0
"""Limits of correction factors; a factor outside them means that something else is wrong."""
Row = Mapping[str, Any]
"""Result of `measured_row`."""


def measured_row(price: Price, measured: Measured, mfu: float | None = None) -> dict[str, Any]:
    """Return a plan with its prediction and its measurement, as a row of `vitpar validate --json`: seconds and bytes.

    `measured_seconds` is the median of the runs' medians, and `runs` has the seconds of the steps of each run. A byte
    count is None where the system reports no peak.
    """
    plan = price.plan
    return {
        "strategy": str(plan),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "batch_size": price.batch_size,
        "predicted_seconds": price.seconds,
        "measured_seconds": measured.middle,
        "runs": [list(run) for run in measured.runs],
        "predicted_memory_bytes": price.memory_bytes,
        "measured_memory_bytes": list(measured.memory),
        "predicted_breakdown_seconds": dict(price.time),
        "mfu": mfu,
        "plan": plan_to_json(plan),
    }


def time_error(row: Row) -> float:
    """Return the relative error of the predicted time: positive if the prediction is too slow."""
    return row["predicted_seconds"] / row["measured_seconds"] - 1


def fullest(row: Row) -> int | None:
    """Return the measured bytes of the fullest rank; None if the system does not report them."""
    return max((size for size in row["measured_memory_bytes"] if size is not None), default=None)


def memory_error(row: Row) -> float | None:
    """Return the relative error of the predicted memory; None if not measured."""
    most = fullest(row)
    return None if most is None else row["predicted_memory_bytes"] / most - 1


def accuracy(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the accuracy of the predictions in `rows`, at least one, as `vitpar validate --json` prints it.

    `repeat` is the difference of second runs to the first, which limits how accurate a prediction can be known to be;
    None unless all plans ran twice. `rank_correlation` is Spearman's, of the orders by time. `chosen_slower_than_best`
    is the relative time by which the plan predicted to be fastest is slower than the fastest.
    """
    repeats = list[float]()
    for row in rows:
        first, *more = map(statistics.median, row["runs"])
        repeats += [more[0] / first - 1] if more else []
    predicted, seconds = ([row[name] for row in rows] for name in ("predicted_seconds", "measured_seconds"))
    return {
        "time_error": _mean_and_largest(map(time_error, rows)),
        "repeat": _mean_and_largest(repeats) if len(repeats) == len(rows) else None,
        "memory_error": _mean_and_largest(map(memory_error, rows)) if any(map(fullest, rows)) else None,
        "rank_correlation": spearman(predicted, seconds),
        "chosen_slower_than_best": seconds[predicted.index(min(predicted))] / min(seconds) - 1,
    }


def _mean_and_largest(errors: Iterable[float | None]) -> dict[str, float]:
    sizes = [abs(error) for error in errors if error is not None]
    return {"mean": statistics.mean(sizes), "largest": max(sizes)}


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


def correction(rows: Sequence[Row]) -> Correction:
    """Return the correction that fits measured plans best.

    Its factors minimize the sum of squared relative errors of time. If the plans do not distinguish computing from
    communication, both get the same factor. Memory is corrected by the median of the bytes that fullest ranks took more
    than predicted, upwards only.
    """
    x, y = np.array(list(map(_parts, rows))).T
    missing = [most - row["predicted_memory_bytes"] for row in rows if (most := fullest(row)) is not None]
    factors = np.full(2, (x + y).sum() / ((x + y) ** 2).sum())
    # Normal equations of: sum over plans of (f_computing · x + f_sending · y - 1)².
    products = np.array([[x @ x, x @ y], [x @ y, y @ y]])
    # A determinant near 0 means that x and y are proportional over the plans: the two factors are not determined.
    if np.linalg.det(products) > 1e-6 * (x @ x) * (y @ y):
        apart = np.linalg.solve(products, [x.sum(), y.sum()])
        factors = apart if ((apart >= LEAST) & (apart <= MOST)).all() else factors
    computing, sending = np.clip(factors, LEAST, MOST).tolist()
    more = statistics.median_high(missing) if missing else 0.0
    return Correction(computing, sending, max(0, round(more)), len(rows))


def _parts(row: Row) -> tuple[float, float]:
    """Return the predicted times of computing and of communication, relative to the measured time of the step."""
    # Waiting for other stages is distributed over both in proportion to them.
    spent = row["predicted_breakdown_seconds"]
    computing, sending = (sum(spent.get(what, 0.0) for what in kind) for kind in (COMPUTING, SENDING))
    share = row["predicted_seconds"] / (computing + sending) / row["measured_seconds"]
    return computing * share, sending * share
