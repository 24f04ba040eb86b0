"""Best plans side by side, one for each model, image size, cluster and batch size: search, notes and table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitpar.errors import PlannerError
from vitpar.planner.automatic import run_search
from vitpar.planner.report.data import Record, Table, plan_record, provenance, sources, title_of
from vitpar.planner.search.best import Progress, Search
from vitpar.planner.training_time import TrainingLength, condition_words, figure, training_time
from vitpar.text import size


def compared(
    where: Record, searching: Search, budget: float, length: TrainingLength, progress: Progress
) -> dict[str, Any]:
    """Search the best plan of a combination, and return it as a row; `why` is the reason where there is no plan.

    where: model, image size, cluster and batch size.
    searching: search over its plans
    budget: bytes of memory per rank
    """
    try:
        best = run_search(searching, budget, progress, most=0).plans[0]
    except PlannerError as error:
        return {**where, "why": str(error)}
    costs = searching.costs
    return {
        **where,
        "device": costs.hardware.device_name,
        "devices": best.plan.world_size,
        "precision": costs.model.precision,
        "notes": list(provenance(costs.hardware, costs.model)),
        "memory_budget_bytes": budget,
        "training": training_time(best, length),
        **plan_record(best, costs),
    }


def comparison_table(rows: Sequence[Record], hours: str) -> Table:
    """Return a row for each combination with its plan, and what most of its step is for, or why there is none.

    hours: name of device-hours
    """
    conditions = tuple(
        dict.fromkeys(name for row in rows if "plan" in row for name in condition_words(row["training"]))
    )
    heads = ("cluster", "devices", "batch", "samples/s", "MFU", "memory", "days", hours)
    table: list[tuple[str, ...]] = []
    for row in rows:
        if "plan" not in row:
            empty = ("",) * (len(heads) + len(conditions) - 3)
            table.append((row["cluster"], "", f"{row['batch_size']:,}", *empty, row["why"].partition(": ")[0]))
            continue
        training = row["training"]
        known = condition_words(training)
        table.append(
            (
                row["cluster"],
                str(row["devices"]),
                f"{row['batch_size']:,}",
                f"{row['images_per_second']:,.0f}",
                "" if row["mfu"] is None else f"{row['mfu']:.1%}",
                size(row["memory_bytes"]),
                figure(training["seconds"] / 86_400),
                figure(training["device_hours"]),
                *(known.get(name, "") for name in conditions),
                f"{title_of(row)}; {limit_words(row)}",
            )
        )
    return (*heads, *("days in all" if name == "days" else name for name in conditions)), table


def limit_words(record: Record) -> str:
    """Return what most of a step is spent on, and all else that takes 5 %, as in `computing 88 %, optimizer 9 %`."""
    most, *others = record["step_shares"].items()
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in (most, *(o for o in others if o[1] >= 0.05)))


def comparison_notes(rows: Sequence[Record]) -> list[str]:
    """Return notes on the origin and uncertainty of all figures, each once."""
    found = ((*row["notes"], *sources(row), row["training"]["assumed"]) for row in rows if "plan" in row)
    return list(dict.fromkeys(note for notes in found for note in notes if note))
