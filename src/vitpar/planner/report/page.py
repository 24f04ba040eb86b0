"""Reports of a search and of scaling as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from vitpar.pages import figures as f
from vitpar.pages.document import facts, table
from vitpar.pages.maps import placement
from vitpar.pages.plotly import Charts, Figure
from vitpar.planner.comparison import Compared
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, plan_title, price, schedule_words
from vitpar.planner.report.comparison import SCALING_WORDS, comparison_table, scaling_notes, scaling_table
from vitpar.planner.report.data import (
    COLUMNS,
    Findings,
    Provenance,
    Table,
    assumptions,
    certainty,
    duration,
    figures,
    noise_words,
    speed_words,
)
from vitpar.planner.report.timeline import messages, timeline
from vitpar.planner.report.uncertainty import uncertainty
from vitpar.planner.search.gains import with_links
from vitpar.planner.search.ranking import form
from vitpar.planner.search.scaling import Point
from vitpar.planner.training_time import hours_name
from vitpar.strategy import Plan
from vitpar.text import size

SIMULATED = "Simulated with the best plan for each number of devices"
WORDS = {"weak": "fixed batch per device", "strong": "fixed total batch"}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors on the speed of links in the sensitivity chart."""
SHOWN = 5
"""Number of plans whose timelines and breakdowns are shown."""
FAMILIES = ("data parallel", "sharded (fsdp)", "tensor parallel", "pipeline")
"""Families of plans, by what is split; a plan belongs to the last one that it has an axis of."""
SPREAD = 12.0
"""Ratio of the largest memory, or the budget, to the smallest above which the axis of memory is logarithmic."""


def page(findings: Findings, moments: float, batches: Sequence[Compared] = ()) -> str:
    """Return the HTML page of a search.

    moments: bytes of optimizer state per byte of parameters.
    batches: the best plan for each batch size, if there are several.
    """
    best, result, costs, doubt = findings.result.plans[0], findings.result, findings.costs, findings.doubt
    title = f"{plan_title(best.plan)}, batch {best.batch_size:,}"
    charts = Charts()
    noise = f'<p class="note">{escape(noise_words(doubt))}</p>' if doubt else ""
    parts = [
        f"<h1>{escape(costs.config.name)}: <code>{escape(str(best.plan))}</code>"
        f"<small>{escape(title.removeprefix(str(best.plan)))}</small></h1>",
        _facts(findings),
        f"<h2>Train it</h2><pre>{escape(findings.train)}</pre>" if findings.train else "",
        "<h2>Speed and memory</h2>",
        _speed_and_memory(findings, charts),
        "<h2>Plans</h2>",
        _table(findings),
        noise,
        *_batch_sizes(batches, charts),
        placement(best.plan, costs.config),
        "<h2>Breakdown of a step</h2>",
    ]
    compared = _unlike(findings)[:SHOWN]
    for number, shown in enumerate(compared):
        parts.append(_plan(shown, findings, charts, opened=number == 0))
    note = "Speed of the same plans if every link were this many times as fast."
    ticks = [f"× {factor:g}" for factor in FACTORS]
    speeds = _sensitivity(compared, costs, moments)
    parts += [
        "<h2>Sensitivity</h2>",
        charts.add(f.sweep("Samples/s by speed of links", speeds, ticks, ("speed of links", "samples/s"), note)),
        f'<p class="note">{result.seconds:.2f} s over {result.strategies:,} strategies and {result.outlines:,} '
        f"pipelines with micro-batches; {escape(certainty(result))}.</p>",
    ]
    return charts.page(f"vitpar search: {title}", parts)


def _facts(findings: Findings) -> str:
    """Return the table of facts about the best plan."""
    best, costs, doubt = findings.result.plans[0], findings.costs, findings.doubt
    remarks = [*(findings.notes or ("measured",)), *assumptions(findings.training), *([doubt.source] if doubt else [])]
    training = {"training": escape(findings.training.words(hours_name(costs.hardware)))} if findings.training else {}
    return facts(
        {
            "speed": escape(speed_words(best, costs)),
            **training,
            "memory": escape(f"{size(best.memory_bytes)} on the fullest rank, of {size(findings.budget)} allowed"),
            **_source(costs, findings.origin, best.plan.world_size),
            "figures": "<br>".join(map(escape, remarks)),
        }
    )


def _source(costs: LayerCosts, origin: Provenance, ranks: int) -> dict[str, str]:
    """Return rows of `facts`: hardware, precision and the command."""
    compiled = ", compiled" if costs.model.compiled else ""
    return {
        "hardware": escape(f"{ranks} ranks of {costs.hardware.device_name} ({costs.hardware.name})"),
        "precision": escape(f"{costs.model.precision}{compiled}"),
        "made by": f"vitpar {escape(origin.version)}: <code>{escape(origin.command)}</code>",
    }


def family(plan: Plan) -> int:
    """Return the index in `FAMILIES` of a plan."""
    if plan.pipeline_degree > 1:
        return 3
    return max(2 if one.degree("tp") > 1 else 1 if one.degree("fsdp") > 1 else 0 for one in plan.distinct)


def _speed_and_memory(findings: Findings, charts: Charts) -> str:
    """Return the chart of the memory and the speed of every listed plan, with buttons for families of plans."""
    listed, budget = findings.listed, findings.budget
    known = sorted({family(one.plan) for one in listed})
    keys = [f.series_key(FAMILIES[number], number) for number in known]
    keys += [f.BANDS] if findings.doubt else []
    sizes = [one.memory_bytes for one in listed]
    unit, scale = ("GB", 1e9) if max(sizes) >= 1e9 else ("MB", 1e6)
    log = max(*sizes, budget) / min(sizes) > SPREAD
    ranges = {"type": "log", "dtick": "D2", "tickformat": ",.3~g"} if log else {"rangemode": "tozero"}
    layout = {
        "xaxis": {"title": {"text": f"memory of the fullest rank, {unit}"}, **ranges},
        "yaxis": {"title": {"text": "samples/s"}, "rangemode": "tozero"},
        **f.budget(budget / scale, f"budget {size(budget)}", log, inside=True),
        "margin": {"l": 62, "r": 14, "t": f.BUTTONS, "b": 42},
    }
    notes = ["The line joins the fastest plans for each amount of memory. The star is the chosen plan."]
    if any(needed > budget for needed in sizes):
        notes.append(f"Hollow marks need more memory than the budget of {size(budget)}.")
    front: list[Price] = []  # plans that are faster than every listed plan with less memory
    for one in sorted(listed, key=lambda one: (one.memory_bytes, -one.images_per_second)):
        if not front or one.images_per_second > front[-1].images_per_second:
            front.append(one)
    line = {"color": "#888888", "width": 1, "shape": "hv"}
    traces = [{**_places(front, scale), "mode": "lines", "line": line, "hoverinfo": "skip"}]
    for number in known:
        traces.append(_marks([one for one in listed if family(one.plan) == number], findings, scale, number))
    return charts.add(Figure("Samples/s by memory", {"traces": traces, "layout": layout}, (), (), notes, keys, 420))


def _places(prices: Sequence[Price], scale: float) -> dict[str, Any]:
    return {"x": [one.memory_bytes / scale for one in prices], "y": [one.images_per_second for one in prices]}


def _marks(prices: Sequence[Price], findings: Findings, scale: float, number: int) -> dict[str, Any]:
    """Return the marks of plans of a family, with their bands of uncertainty. number: index in `FAMILIES`."""
    best, colour, mark = findings.result.plans[0], f.series_colour(number), f.series_mark(number)
    doubts = [uncertainty(one, findings.costs) for one in prices]
    shares = [doubt.share if doubt else 0.0 for doubt in doubts]
    return {
        **_places(prices, scale),
        "mode": "markers",
        "name": FAMILIES[number],
        "error_y": f.band([one.images_per_second for one in prices], shares, colour),
        "marker": {
            "color": colour,
            "symbol": [
                ("star" if one is best else mark) + "-open" * (one.memory_bytes > findings.budget) for one in prices
            ],
            "size": [15 if one is best else 9 for one in prices],
        },
        "text": [plan_title(one.plan) for one in prices],
        "customdata": [
            [
                f"{one.images_per_second:,.1f} samples/s",
                _band_words(one, share),
                f"{size(one.memory_bytes)} on the fullest rank, batch {one.batch_size:,}",
            ]
            for one, share in zip(prices, shares, strict=True)
        ],
        "hovertemplate": "<b>%{text}</b><br>%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
    }


def _band_words(one: Price, share: float) -> str:
    low, high = ((1 + sign * share) * one.images_per_second for sign in (-1, 1))
    return f"± {100 * share:.3g} %: {low:,.0f} to {high:,.0f}" if share else "uncertainty unknown"


def _table(findings: Findings) -> str:
    """Return the table of all listed plans with their figures, and why the obvious ones were not chosen."""
    best, doubt = findings.result.plans[0], findings.doubt
    why = {(r.price.plan, r.price.batch_size): findings.why(r) for r in findings.reasons if r.price}
    rows = []
    for one in findings.listed:
        name = f"<code>{escape(str(one.plan))}</code>{schedule_words(one.plan)}"
        rows.append([name, *figures(one, best, doubt), escape(why.get((one.plan, one.batch_size), ""))])
    for reason in findings.reasons:
        if reason.price is None:
            rows.append([f"<code>{escape(reason.plan)}</code>", *("",) * len(COLUMNS), escape(reason.why)])
    return table(["plan", *COLUMNS, "why not"], rows, numbers=slice(1, -1))


def _batch_sizes(rows: Sequence[Compared], charts: Charts) -> list[str]:
    """Return the chart and the table of the best plans for several batch sizes."""
    if not rows:
        return []
    series = _series("best plan", [(row.best.price, row.best.costs) if row.best else None for row in rows])
    ticks = [f"{row.combination.batch_size:,}" for row in rows]
    chart = f.sweep("Samples/s by batch size", [series], ticks, ("samples per step", "samples/s"))
    return ["<h2>Batch sizes</h2>", charts.add(chart), _plan_table(comparison_table(rows), slice(1, -1))]


def _plan_table(found: Table, numbers: slice) -> str:
    """Return the HTML of a table whose last column is a plan. numbers: columns that are right-aligned."""
    heads, rows = found
    cells = ([*map(escape, row[:-1]), f"<code>{escape(row[-1])}</code>"] for row in rows)
    return table([*heads, "plan"], cells, numbers)


def _plan(priced: Price, findings: Findings, charts: Charts, opened: bool) -> str:
    """Return the charts of a plan's time, timeline and memory. opened: whether they are unfolded at first."""
    places = [f"pp {place}" if len(priced.memory) > 1 else "all ranks" for place in range(len(priced.memory))]
    memory = [{name: part for name, part in asdict(one).items() if name != "host"} for one in priced.memory]
    each = "the fullest rank at each pp index" if len(places) > 1 else "the fullest rank"
    seconds = ("s", 1.0) if priced.seconds >= 1 else ("ms", 1e-3)
    large = ("GB", 1e9) if priced.memory_bytes >= 1e9 else ("MB", 1e6)
    drawn = [
        f.bars("Time of a step", list(zip(places, priced.rank_times, strict=True)), duration, seconds, note=_TIMES),
        f.timeline("Timeline of a step", timeline(priced, findings.costs), priced.seconds, messages=messages(priced)),
        f.bars(f"Memory of {each}", list(zip(places, memory, strict=True)), size, large, limit=findings.budget),
    ]
    return (
        f"<details{' open' * opened}><summary>{escape(plan_title(priced.plan))}: "
        f"{escape(speed_words(priced, findings.costs))}</summary>{''.join(map(charts.add, drawn))}</details>"
    )


_TIMES = (
    "Computing: forward, backward, teacher, other. Communication that computing does not hide: tensor, gather, "
    "gradients, redistribution. Idle: waiting for other stages (the bubble), uneven ranks."
)


def _unlike(findings: Findings) -> list[Price]:
    """Return the best plan and those other plans that fit, one for each form (`form`)."""
    kept: dict[tuple, Price] = {}
    for one in findings.listed:
        if one.memory_bytes <= findings.budget or one is findings.result.plans[0]:
            kept.setdefault(form(one), one)
    return list(kept.values())


def _sensitivity(prices: Sequence[Price], costs: LayerCosts, moments: float) -> list[f.Series]:
    """Return the images per second of each plan, the first of each title, with all links faster by each of FACTORS."""
    machines = [with_links(costs, factor) for factor in FACTORS]
    return [
        f.Series(title, [price(one.plan, machine, one.batch_size, moments).images_per_second for machine in machines])
        for title, one in reversed({plan_title(one.plan): one for one in reversed(prices)}.items())
    ]


def scaling_page(title: str, by_regime: Mapping[str, Sequence[Point]], costs: LayerCosts, origin: Provenance) -> str:
    """Return the HTML page of a scaling prediction: images per second per device and in all, and the plans.

    by_regime: points by scaling regime, for the same numbers of ranks
    """
    points, charts = next(iter(by_regime.values())), Charts()
    ticks = [str(point.ranks) for point in points]
    regimes = f"{'; '.join(f'{regime}: {WORDS[regime]}' for regime in by_regime)}."
    notes = "; ".join((SIMULATED, *scaling_notes(by_regime, costs)))
    parts = [
        f"<h1>{escape(title)}</h1>",
        facts({**_source(costs, origin, points[-1].ranks), "figures": escape(notes)}),
        "<h2>Scaling</h2>",
    ]
    for name, each in (("Samples/s per device", True), ("Samples/s", False)):
        series = [
            _series(regime, [(one.price, costs) if one.price else None for one in points], each)
            for regime, points in by_regime.items()
        ]
        figure = f.sweep(f"{name} by number of devices", series, ticks, ("devices", "samples/s"), regimes)
        parts.append(charts.add(figure))
    for regime, points in by_regime.items():
        parts.append(f"<h2>{regime.capitalize()} scaling: {WORDS[regime]}</h2>")
        parts.append(_plan_table(scaling_table(points, costs), slice(-1)))
    parts.append(f'<p class="note">{escape(". ".join(SCALING_WORDS))}.</p>')
    return charts.page(title, parts)


def _series(name: str, found: Sequence[tuple[Price, LayerCosts] | None], each: bool = False) -> f.Series:
    """Return the speeds of best plans, with their uncertainties. each: whether they are those of one device."""
    doubts = [one and uncertainty(*one) for one in found]
    prices = [one and one[0] for one in found]
    return f.Series(
        name,
        [one.images_per_second / (one.plan.world_size if each else 1) if one else None for one in prices],
        [doubt.share if doubt else 0.0 for doubt in doubts],
        [f"{plan_title(one.plan)}, {size(one.memory_bytes)}" if one else "" for one in prices],
    )
