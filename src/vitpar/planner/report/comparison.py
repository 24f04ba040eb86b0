"""Best plans for several clusters, models, batch sizes or numbers of devices, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from vitpar.planner.comparison import Compared
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, plan_title
from vitpar.planner.report.data import (
    Provenance,
    Table,
    assumptions,
    origin_to_json,
    price_to_json,
    provenance,
)
from vitpar.planner.report.uncertainty import uncertainty
from vitpar.planner.search.gains import shares
from vitpar.planner.search.scaling import Point, efficiency
from vitpar.planner.training_time import figure, hours_name
from vitpar.text import size


def comparison_table(rows: Sequence[Compared]) -> Table:
    """Return a row for each combination with its plan, and what most of its step is for, or why there is none."""
    found = [row.best for row in rows if row.best]
    hours = hours_name(found[0].costs.hardware) if found else "GPU-hours"
    conditions = tuple(dict.fromkeys(name for best in found for name in best.training.conditions))
    heads = ("cluster", "devices", "batch", "samples/s", "MFU", "memory", "days", hours)
    table: list[tuple[str, ...]] = []
    for row in rows:
        where, best = row.combination, row.best
        if best is None:
            empty = ("",) * (len(heads) + len(conditions) - 3)
            table.append((where.cluster, "", f"{where.batch_size:,}", *empty, row.why.partition(": ")[0]))
            continue
        price, mfu = best.price, best.price.mfu(best.costs)
        table.append(
            (
                where.cluster,
                str(price.plan.world_size),
                f"{where.batch_size:,}",
                f"{price.images_per_second:,.0f}",
                "" if mfu is None else f"{mfu:.1%}",
                size(price.memory_bytes),
                figure(best.training.days),
                figure(best.training.device_hours),
                *(best.training.conditions.get(name, "") for name in conditions),
                f"{plan_title(price.plan)}; {limit_words(price)}",
            )
        )
    return (*heads, *("days in all" if name == "days" else name for name in conditions)), table


def limit_words(price: Price) -> str:
    """Return what most of a step is spent on, and all else that takes 5 %, as in `computing 88 %, optimizer 9 %`."""
    most, *others = shares(price).items()
    return ", ".join(f"{name} {share * 100:.0f} %" for name, share in (most, *(o for o in others if o[1] >= 0.05)))


def comparison_notes(rows: Sequence[Compared]) -> tuple[str, ...]:
    """Return notes on the origin and uncertainty of all figures, each once."""
    notes: dict[str, None] = {}
    for best in (row.best for row in rows if row.best):
        doubt = uncertainty(best.price, best.costs)
        notes |= dict.fromkeys(provenance(best.costs.hardware, best.costs.model))
        notes |= dict.fromkeys([doubt.source] if doubt else [])
        notes |= dict.fromkeys(assumptions(best.training))
    return tuple(notes)


def comparison_to_json(rows: Iterable[Compared]) -> list[dict[str, object]]:
    """Return a record for each combination; `why` is the reason where there is no plan."""
    records: list[dict[str, object]] = []
    for row in rows:
        where, best = asdict(row.combination), row.best
        if best is None:
            records.append({**where, "why": row.why})
            continue
        about = {
            "device": best.costs.hardware.device_name,
            "devices": best.price.plan.world_size,
            "precision": best.costs.model.precision,
            "memory_budget_bytes": best.budget,
            "training": best.training.to_json(),
        }
        records.append({**where, **about, **price_to_json(best.price, best.costs)})
    return records


def scaling_to_json(
    by_regime: Mapping[str, Sequence[Point]], costs: LayerCosts, origin: Provenance
) -> dict[str, object]:
    """Return a scaling prediction as JSON: by scaling regime, a record for each number of ranks.

    Records without a plan are those where no plan fits.
    """
    points = {
        regime: [
            {
                "ranks": point.ranks,
                "batch_size": point.batch_size,
                "efficiency": part,
                **({"at_most_better_by": point.gap, **price_to_json(point.price, costs)} if point.price else {}),
                **({"training": point.training.to_json()} if point.training else {}),
            }
            for point, part in zip(points, efficiency(points), strict=True)
        ]
        for regime, points in by_regime.items()
    }
    return {**origin_to_json(origin, costs), **points}


SCALING_WORDS = (
    "efficiency: samples/s per rank, relative to the fewest ranks; above 100 % where ranks share the optimizer's work",
    "gap: upper bound on how much faster any plan could be",
    "waiting: share of the time in which devices wait for input, with --images-per-second; samples/s are without it",
)
"""Meaning of columns of `scaling_table`."""


def scaling_notes(by_regime: Mapping[str, Sequence[Point]], costs: LayerCosts) -> tuple[str, ...]:
    """Return notes on the origin of a scaling prediction's figures, with that of each uncertainty.

    by_regime: points by scaling regime
    """
    prices = [point.price for points in by_regime.values() for point in points if point.price is not None]
    doubts = filter(None, (uncertainty(price, costs) for price in prices))
    return (*provenance(costs.hardware, costs.model), *dict.fromkeys(doubt.source for doubt in doubts))


def scaling_table(points: Sequence[Point], costs: LayerCosts) -> Table:
    """Return a row for each point with its plan. The gap is `Result.gap` of the search."""
    conditions = tuple(dict.fromkeys(name for point in points if point.training for name in point.training.conditions))
    heads, rows = ("ranks", "batch", "samples/s", "per rank", "MFU", "efficiency", "gap", *conditions), []
    for point, part in zip(points, efficiency(points), strict=True):
        where, price = (str(point.ranks), f"{point.batch_size:,}"), point.price
        if price is None or part is None:
            rows.append((*where, *("",) * (len(heads) - 2), "no plan fits"))
            continue
        doubt, mfu = uncertainty(price, costs), price.mfu(costs)
        rows.append(
            (
                *where,
                f"{price.images_per_second:,.0f}{f' {doubt}' if doubt else ''}",
                f"{point.per_rank:,.1f}",
                "" if mfu is None else f"{mfu:.1%}",
                f"{part:.1%}",
                f"{point.gap:.1%}",
                *((point.training.conditions if point.training else {}).get(name, "") for name in conditions),
                plan_title(price.plan),
            )
        )
    return heads, rows
