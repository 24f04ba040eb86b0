"""Tables of best plans: of combinations of models and clusters, and of numbers of devices (predicted scaling)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from vitpar.errors import PlannerError
from vitpar.planner.automatic import run_search
from vitpar.planner.report.data import Record, Table, band_words, plan_record, provenance, sources, title_of
from vitpar.planner.search.best import Progress, Search
from vitpar.planner.training_time import TrainingLength, condition_words, figure, training_time
from vitpar.text import size

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


def best_row(
    where: Record,
    searching: Search,
    budget: float,
    length: TrainingLength | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return the best plan of a search as a row of a table; `why` is the reason where there is no plan.

    where: first fields of the row, such as model and cluster.
    searching: search over plans of one batch size
    budget: bytes of memory per rank
    length: of the complete training; None leaves its duration out
    """
    try:
        found = run_search(searching, budget, progress, most=0)
    except PlannerError as error:
        return {**where, "why": str(error)}
    best, costs = found.plans[0], searching.costs
    return {
        **where,
        "device": costs.hardware.device_name,
        "devices": best.plan.world_size,
        "precision": costs.model.precision,
        "notes": list(provenance(costs.hardware, costs.model)),
        "memory_budget_bytes": budget,
        "at_most_better_by": found.gap,
        **({"training": training_time(best, length)} if length else {}),
        **plan_record(best, costs),
    }


def comparison_table(rows: Sequence[Record], hours: str) -> Table:
    """Return a row for each combination with its plan, and what most of its step is for, or why there is none.

    hours: name of device-hours
    """
    heads, cells = _best_plans(
        ("cluster", "devices", "batch", "samples/s", "MFU", "memory", "days", hours),
        rows,
        lambda row: (row["cluster"], str(row.get("devices", "")), f"{row['batch_size']:,}"),
        lambda row: (
            f"{row['images_per_second']:,.0f}",
            "" if row["mfu"] is None else f"{row['mfu']:.1%}",
            size(row["memory_bytes"]),
            figure(row["training"]["seconds"] / 86_400),
            figure(row["training"]["device_hours"]),
        ),
        lambda row: f"{title_of(row)}; {limit_words(row)}" if "plan" in row else row["why"].partition(": ")[0],
    )
    return (*heads[:8], *("days in all" if name == "days" else name for name in heads[8:])), cells


def _best_plans(
    heads: tuple[str, ...],
    rows: Sequence[Record],
    where: Callable[[Record], tuple[str, ...]],
    figures: Callable[[Record], tuple[str, ...]],
    last: Callable[[Record], str],
) -> Table:
    """Return a table with columns for the conditions of trainings (`condition_words`) behind those of `heads`.

    where: returns a row's first cells.
    figures: returns its other cells under `heads`; not called for a row without a plan.
    last: returns its last cell.
    """
    conditions = [condition_words(row["training"]) if "training" in row else {} for row in rows]
    names = tuple(dict.fromkeys(name for known in conditions for name in known))
    table = []
    for row, known in zip(rows, conditions, strict=True):
        first = where(row)
        lacking = ("",) * (len(heads) - len(first))
        cells = figures(row) if "plan" in row else lacking
        table.append((*first, *cells, *(known.get(name, "") for name in names), last(row)))
    return (*heads, *names), table


def limit_words(record: Record) -> str:
    """Return what most of a step is spent on, and all else that takes 5 %, as in `computing 88 %, optimizer 9 %`."""
    most, *others = record["step_shares"].items()
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in (most, *(o for o in others if o[1] >= 0.05)))


def comparison_notes(rows: Sequence[Record]) -> list[str]:
    """Return notes on the origin and uncertainty of all figures, each once."""
    found = ((*row["notes"], *sources(row), row["training"]["assumed"]) for row in rows if "plan" in row)
    return list(dict.fromkeys(note for notes in found for note in notes if note))


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
    return _best_plans(
        ("ranks", "batch", "samples/s", "per rank", "MFU", "efficiency", "gap"),
        points,
        lambda point: (str(point["ranks"]), f"{point['batch_size']:,}"),
        lambda point: (
            " ".join(filter(None, (f"{point['images_per_second']:,.0f}", band_words(point)))),
            f"{point['images_per_second'] / point['ranks']:,.1f}",
            "" if point["mfu"] is None else f"{point['mfu']:.1%}",
            f"{point['efficiency']:.1%}",
            f"{point['at_most_better_by']:.1%}",
        ),
        lambda point: title_of(point) if "plan" in point else "no plan fits",
    )
