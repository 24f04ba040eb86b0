"""How speed grows with devices, as data and as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from vitpar.planner.report import svg
from vitpar.planner.report.data import price_to_json
from vitpar.planner.report.page import document
from vitpar.planner.search.scaling import Point, efficiency
from vitpar.strategy.words import count

SIMULATED = "Simulated, with the best plan for every number of devices"
WORDS = {"weak": "as many images for each device", "strong": "as many images in all"}


def scaling_to_json(found: Mapping[str, Sequence[Point]], notes: Sequence[str]) -> dict[str, Any]:
    """By kind of scaling, a point for each number of ranks; no plan where nothing fits. notes: where figures come
    from."""
    points = {
        kind: [
            {
                "ranks": point.ranks,
                "batch_size": point.batch_size,
                "efficiency": part,
                **({} if point.price is None else {"at_most_better_by": point.gap, **price_to_json(point.price)}),
            }
            for point, part in zip(points, efficiency(points), strict=True)
        ]
        for kind, points in found.items()
    }
    return {"notes": list(notes), **points}


def scaling_page(title: str, found: Mapping[str, Sequence[Point]], notes: Sequence[str]) -> str:
    """Images a second of a device over the number of devices, and the plans."""
    ticks = [str(point.ranks) for point in next(iter(found.values()))]
    series = {f"{kind}: {WORDS[kind]}": [point.per_rank for point in points] for kind, points in found.items()}
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<h2>Images a second of a device, over the number of devices</h2>",
        svg.lines(series, ticks, "images/s"),
        f'<p class="note">{escape("; ".join((SIMULATED, *notes)))}.</p>',
    ]
    for kind, points in found.items():
        parts += [f"<h2>{kind.capitalize()} scaling: {WORDS[kind]}</h2>", _table(points)]
    return document(title, parts)


def _table(points: Sequence[Point]) -> str:
    names = ("batch", "images/s", "efficiency", "at most better by")
    rows = ['<tr><th class="n">devices</th>' + "".join(f'<th class="n">{n}</th>' for n in names) + "<th>plan</th></tr>"]
    for point, part in zip(points, efficiency(points), strict=True):
        speed = f"{point.price.images_per_second:,.0f}" if point.price else ""
        share, gap = ("", "") if part is None else (f"{part:.1%}", f"{point.gap:.1%}")
        plan = "no plan fits"
        if point.price is not None:
            plan = f"{point.price.plan}, {count(point.price.plan.microbatches or 1, 'micro-batch')}"
        figures = (point.ranks, point.batch_size, speed, share, gap)
        cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
        rows.append(f"<tr>{cells}<td>{escape(plan)}</td></tr>")
    return f"<table>{''.join(rows)}</table>"
