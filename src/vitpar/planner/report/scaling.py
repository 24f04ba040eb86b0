"""Predicted scaling: the best plan for each number of devices, by simulation, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from vitpar.errors import PlannerError
from vitpar.planner.report.data import Record, Table, band_words, plan_record, sources, title_of
from vitpar.planner.search.best import Search
from vitpar.planner.training_time import TrainingLength, condition_words, training_time

Regime = Literal["weak", "strong"]
"""Scaling regime: whether the batch size grows with the number of devices, or is fixed."""
WORDS: dict[Regime, str] = {"weak": "fixed batch per device", "strong": "fixed total batch"}
"""Meaning of each regime."""
COLUMN_WORDS = (
    "efficiency: samples/s per rank, relative to the fewest ranks; above 100 % where ranks share the optimizer's work",
    "gap: upper bound on how much faster any plan could be",
    "waiting: share of the time in which devices wait for input, with --images-per-second; samples/s are without it",
)
"""Meaning of columns of `scaling_table`."""


def images(regime: Regime, batch_size: int, ranks: int, most: int) -> int:
    """Return the global batch size on `ranks` devices.

    With strong scaling it is always `batch_size`. With weak scaling it is proportional to `ranks`: `batch_size` on
    `most` devices. Raises PlannerError if that is not an integer.
    """
    if regime == "strong":
        return batch_size
    if batch_size * ranks % most:
        raise PlannerError(
            f"a batch of {batch_size} on {most} ranks does not scale to a whole number of samples on {ranks}: use a "
            f"--batch-size divisible by {most}"
        )
    return batch_size * ranks // most


def best_on(searching: Search, budget: float, length: TrainingLength | None = None) -> dict[str, Any]:
    """Return the best plan of a search; one without a `plan` if none fits, see `with_efficiency`.

    searching: search over plans of one batch size.
    budget: bytes of memory per device
    length: of the complete training, under the conditions of the cluster; None if these are unknown
    """
    space, found = searching.space, searching.best(budget)
    where = {"ranks": space.ranks, "batch_size": space.batch_sizes[0], "efficiency": None}
    if not found.plans:
        return where
    best = found.plans[0]
    training = {"training": training_time(best, length)} if length else {}
    return {**where, "at_most_better_by": found.gap, **plan_record(best, searching.costs), **training}


def with_efficiency(points: Sequence[Record]) -> list[dict[str, Any]]:
    """Return points with their scaling efficiency; None for points without a plan.

    It is images per second per device, relative to the first point with a plan.

    points: smallest number of devices first
    """
    each = [point["images_per_second"] / point["ranks"] if "plan" in point else None for point in points]
    first = next(filter(None, each), None)
    return [
        {**point, "efficiency": one / first if one and first else None} for point, one in zip(points, each, strict=True)
    ]


def scaling_notes(found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes on the origin of a scaling prediction's figures, with that of each uncertainty."""
    points: Iterable[Record] = (point for regime in WORDS for point in found[regime] if "plan" in point)
    return (*found["notes"], *dict.fromkeys(source for point in points for source in sources(point)))


def scaling_table(points: Sequence[Record]) -> Table:
    """Return a row for each point with its plan. The gap is `Result.gap` of the search."""
    known = [condition_words(point["training"]) if "training" in point else {} for point in points]
    conditions = tuple(dict.fromkeys(name for words in known for name in words))
    heads, rows = ("ranks", "batch", "samples/s", "per rank", "MFU", "efficiency", "gap", *conditions), []
    for point, words in zip(points, known, strict=True):
        where = (str(point["ranks"]), f"{point['batch_size']:,}")
        if "plan" not in point:
            rows.append((*where, *("",) * (len(heads) - 2), "no plan fits"))
            continue
        speed, band = point["images_per_second"], band_words(point)
        rows.append(
            (
                *where,
                f"{speed:,.0f}{f' {band}' if band else ''}",
                f"{speed / point['ranks']:,.1f}",
                "" if point["mfu"] is None else f"{point['mfu']:.1%}",
                f"{point['efficiency']:.1%}",
                f"{point['at_most_better_by']:.1%}",
                *(words.get(name, "") for name in conditions),
                title_of(point),
            )
        )
    return heads, rows
