"""Reports of a search and of scaling as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, plan_title, price, schedule_words
from vitpar.planner.report.data import (
    COLUMNS,
    Record,
    Table,
    certainty,
    duration,
    figures,
    listed,
    noise_words,
    plan_of,
    plan_record,
    remarks,
    same,
    speed_words,
    title_of,
    why_words,
)
from vitpar.planner.report.tables import COLUMN_WORDS, WORDS, comparison_table, scaling_notes, scaling_table
from vitpar.planner.report.timeline import messages, timeline
from vitpar.planner.search.gains import with_links
from vitpar.planner.search.ranking import form
from vitpar.planner.training_time import hours_name, training_rows
from vitpar.runs.pages import figures as f
from vitpar.runs.pages.document import facts, table
from vitpar.runs.pages.maps import placement
from vitpar.runs.pages.plotly import Charts, Figure
from vitpar.strategy import Plan
from vitpar.text import size

SIMULATED = "Simulated with the best plan for each number of devices"
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors on the speed of links in the sensitivity chart."""
SHOWN = 5
"""Number of plans whose timelines and breakdowns are shown."""
FAMILIES = ("data parallel", "sharded (fsdp)", "tensor parallel", "pipeline")
"""Families of plans, by what is split; a plan belongs to the last one that it has an axis of."""
SPREAD = 12.0
"""Ratio of the largest memory, or the budget, to the smallest above which the axis of memory is logarithmic."""


def page(found: Record, costs: LayerCosts, moments: float) -> str:
    """Return the HTML page of a search.

    found: result of ``vitpar.planner.report.data.search_record``, by `costs`.
    moments: bytes of optimizer state per byte of parameters.
    """
    best, looked, charts = found["plans"][0], found["looked_at"], Charts()
    title, hours = f"{title_of(best)}, batch {best['batch_size']:,}", hours_name(found["device_type"])
    noise = noise_words(best)
    parts = [
        f"<h1>{escape(costs.config.name)}: <code>{escape(best['strategy'])}</code>"
        f"<small>{escape(title.removeprefix(best['strategy']))}</small></h1>",
        _facts(found),
        f"<h2>Train it</h2><pre>{escape(found['train'])}</pre>" if found["train"] else "",
        "<h2>Speed and memory</h2>",
        _speed_and_memory(found, charts),
        "<h2>Plans</h2>",
        _table(found),
        f'<p class="note">{escape(noise)}</p>' if noise else "",
        *_batch_sizes(found["batch_sizes"], hours, charts),
        placement(plan_of(best), costs.config),
        "<h2>Breakdown of a step</h2>",
    ]
    compared = _unlike(found, costs, moments)[:SHOWN]
    for number, shown in enumerate(compared):
        parts.append(_plan(shown, costs, found["memory_budget_bytes"], charts, opened=number == 0))
    note = "Speed of the same plans if every link were this many times as fast."
    ticks = [f"× {factor:g}" for factor in FACTORS]
    speeds = _sensitivity(compared, costs, moments)
    parts += [
        "<h2>Sensitivity</h2>",
        charts.add(f.sweep("Samples/s by speed of links", speeds, ticks, ("speed of links", "samples/s"), note)),
        f'<p class="note">{found["search_seconds"]:.2f} s over {looked["strategies"]:,} strategies and '
        f"{looked['kinds']:,} pipelines with micro-batches; {escape(certainty(found))}.</p>",
    ]
    return charts.page(f"vitpar search: {title}", parts)


def _facts(found: Record) -> str:
    """Return the table of facts about the best plan."""
    best, training, budget = found["plans"][0], found["training"], found["memory_budget_bytes"]
    notes = remarks(found["notes"] or ("measured",), training, best)
    length = training_rows(training, hours_name(found["device_type"]))
    return facts(
        {
            "speed": escape(speed_words(best)),
            **{name: escape(words) for name, words in length},
            "memory": escape(f"{size(best['memory_bytes'])} on the fullest rank, of {size(budget)} allowed"),
            **_source(found, plan_of(best).world_size),
            "figures": "<br>".join(map(escape, notes)),
        }
    )


def _source(found: Record, ranks: int) -> dict[str, str]:
    """Return rows of `facts`: hardware, precision and the command."""
    return {
        "hardware": escape(f"{ranks} ranks of {found['device']} ({found['hardware']})"),
        "precision": escape(f"{found['precision']}{', compiled' * found['compiled']}"),
        "made by": f"vitpar {escape(found['vitpar'])}: <code>{escape(found['command'])}</code>",
    }


def family(plan: Plan) -> int:
    """Return the index in `FAMILIES` of a plan."""
    if plan.pipeline_degree > 1:
        return 3
    return max(2 if one.degree("tp") > 1 else 1 if one.degree("fsdp") > 1 else 0 for one in plan.distinct)


def _speed_and_memory(found: Record, charts: Charts) -> str:
    """Return the chart of the memory and the speed of every listed plan, with buttons for families of plans."""
    plans, budget = listed(found), found["memory_budget_bytes"]
    families = [family(plan_of(one)) for one in plans]
    known = sorted(set(families))
    keys = [f.series_key(FAMILIES[number], number) for number in known]
    keys += [f.BANDS] if plans[0]["uncertainty"] else []
    sizes = [one["memory_bytes"] for one in plans]
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
    front: list[Record] = []  # plans that are faster than every listed plan with less memory
    for one in sorted(plans, key=lambda one: (one["memory_bytes"], -one["images_per_second"])):
        if not front or one["images_per_second"] > front[-1]["images_per_second"]:
            front.append(one)
    line = {"color": "#888888", "width": 1, "shape": "hv"}
    traces = [{**_places(front, scale), "mode": "lines", "line": line, "hoverinfo": "skip"}]
    for number in known:
        members = [one for one, its in zip(plans, families, strict=True) if its == number]
        traces.append(_marks(members, plans[0], budget, scale, number))
    return charts.add(Figure("Samples/s by memory", {"traces": traces, "layout": layout}, (), (), notes, keys, 420))


def _places(plans: Sequence[Record], scale: float) -> dict[str, Any]:
    return {"x": [one["memory_bytes"] / scale for one in plans], "y": [one["images_per_second"] for one in plans]}


def _marks(plans: Sequence[Record], best: Record, budget: float, scale: float, number: int) -> dict[str, Any]:
    """Return the marks of plans of a family, with their bands of uncertainty. number: index in `FAMILIES`."""
    colour, mark, shares = f.series_colour(number), f.series_mark(number), list(map(_share, plans))
    return {
        **_places(plans, scale),
        "mode": "markers",
        "name": FAMILIES[number],
        "error_y": f.band([one["images_per_second"] for one in plans], shares, colour),
        "marker": {
            "color": colour,
            "symbol": [("star" if one is best else mark) + "-open" * (one["memory_bytes"] > budget) for one in plans],
            "size": [15 if one is best else 9 for one in plans],
        },
        "text": [title_of(one) for one in plans],
        "customdata": [
            [
                f"{one['images_per_second']:,.1f} samples/s",
                _range_words(one["images_per_second"], share),
                f"{size(one['memory_bytes'])} on the fullest rank, batch {one['batch_size']:,}",
            ]
            for one, share in zip(plans, shares, strict=True)
        ],
        "hovertemplate": "<b>%{text}</b><br>%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
    }


def _share(record: Record) -> float:
    return record["uncertainty"]["share"] if record["uncertainty"] else 0.0


def _range_words(speed: float, share: float) -> str:
    low, high = ((1 + sign * share) * speed for sign in (-1, 1))
    return f"± {100 * share:.3g} %: {low:,.0f} to {high:,.0f}" if share else "uncertainty unknown"


def _table(found: Record) -> str:
    """Return the table of all listed plans with their figures, and why the obvious ones were not chosen."""
    best, reasons, rows = found["plans"][0], found["why_not"], []
    for one in listed(found):
        name = f"<code>{escape(one['strategy'])}</code>{schedule_words(plan_of(one))}"
        why = [why_words(reason, found) for reason in reasons if "plan" in reason and same(reason, one)]
        rows.append([name, *figures(one, best), escape("".join(why[-1:]))])
    for reason in reasons:
        if "plan" not in reason:
            rows.append([f"<code>{escape(reason['strategy'])}</code>", *("",) * len(COLUMNS), escape(reason["why"])])
    return table(["plan", *COLUMNS, "why not"], rows, numbers=slice(1, -1))


def _batch_sizes(rows: Sequence[Record], hours: str, charts: Charts) -> list[str]:
    """Return the chart and the table of the best plans for several batch sizes."""
    if not rows:
        return []
    ticks = [f"{row['batch_size']:,}" for row in rows]
    chart = f.sweep("Samples/s by batch size", [_series("best plan", rows)], ticks, ("samples per step", "samples/s"))
    return ["<h2>Batch sizes</h2>", charts.add(chart), _plan_table(comparison_table(rows, hours), slice(1, -1))]


def _plan_table(found: Table, numbers: slice) -> str:
    """Return the HTML of a table whose last column is a plan. numbers: columns that are right-aligned."""
    heads, rows = found
    cells = ([*map(escape, row[:-1]), f"<code>{escape(row[-1])}</code>"] for row in rows)
    return table([*heads, "plan"], cells, numbers)


def _plan(priced: Price, costs: LayerCosts, budget: float, charts: Charts, opened: bool) -> str:
    """Return the charts of a plan's time, timeline and memory. opened: whether they are unfolded at first."""
    places = [f"pp {place}" if len(priced.memory) > 1 else "all ranks" for place in range(len(priced.memory))]
    memory = [{name: part for name, part in asdict(one).items() if name != "host"} for one in priced.memory]
    each = "the fullest rank at each pp index" if len(places) > 1 else "the fullest rank"
    seconds = ("s", 1.0) if priced.seconds >= 1 else ("ms", 1e-3)
    large = ("GB", 1e9) if priced.memory_bytes >= 1e9 else ("MB", 1e6)
    drawn = [
        f.bars("Time of a step", list(zip(places, priced.rank_times, strict=True)), duration, seconds, note=_TIMES),
        f.timeline("Timeline of a step", timeline(priced, costs), priced.seconds, messages=messages(priced)),
        f.bars(f"Memory of {each}", list(zip(places, memory, strict=True)), size, large, limit=budget),
    ]
    return (
        f"<details{' open' * opened}><summary>{escape(plan_title(priced.plan))}: "
        f"{escape(speed_words(plan_record(priced, costs)))}</summary>{''.join(map(charts.add, drawn))}</details>"
    )


_TIMES = (
    "Computing: forward, backward, teacher, other. Communication that computing does not hide: tensor, gather, "
    "gradients, redistribution. Idle: waiting for other stages (the bubble)."
)


def _unlike(found: Record, costs: LayerCosts, moments: float) -> list[Price]:
    """Return the best plan and those other plans that fit, priced again, one for each form (`form`)."""
    best, kept = found["plans"][0], dict[tuple, Price]()
    for one in listed(found):
        if one is best or one["memory_bytes"] <= found["memory_budget_bytes"]:
            priced = price(plan_of(one), costs, one["batch_size"], moments)
            kept.setdefault(form(priced), priced)
    return list(kept.values())


def _sensitivity(prices: Sequence[Price], costs: LayerCosts, moments: float) -> list[f.Series]:
    """Return the images per second of each plan, the first of each title, with all links faster by each of FACTORS."""
    machines = [with_links(costs, factor) for factor in FACTORS]
    return [
        f.Series(title, [price(one.plan, machine, one.batch_size, moments).images_per_second for machine in machines])
        for title, one in reversed({plan_title(one.plan): one for one in reversed(prices)}.items())
    ]


def scaling_page(title: str, found: Record) -> str:
    """Return the HTML page of a scaling prediction: images per second per device and in all, and the plans.

    found: what `vitpar scaling --json` prints, with points by scaling regime for the same numbers of ranks
    """
    points, charts = found["weak"], Charts()
    ticks = [str(point["ranks"]) for point in points]
    regimes = f"{'; '.join(f'{regime}: {words}' for regime, words in WORDS.items())}."
    notes = "; ".join((SIMULATED, *scaling_notes(found)))
    parts = [
        f"<h1>{escape(title)}</h1>",
        facts({**_source(found, points[-1]["ranks"]), "figures": escape(notes)}),
        "<h2>Scaling</h2>",
    ]
    for name, each in (("Samples/s per device", True), ("Samples/s", False)):
        series = [_series(regime, found[regime], each) for regime in WORDS]
        figure = f.sweep(f"{name} by number of devices", series, ticks, ("devices", "samples/s"), regimes)
        parts.append(charts.add(figure))
    for regime, words in WORDS.items():
        parts.append(f"<h2>{regime.capitalize()} scaling: {words}</h2>")
        parts.append(_plan_table(scaling_table(found[regime]), slice(-1)))
    parts.append(f'<p class="note">{escape(". ".join(COLUMN_WORDS))}.</p>')
    return charts.page(title, parts)


def _series(name: str, rows: Sequence[Record], each: bool = False) -> f.Series:
    """Return the speeds of best plans, with their uncertainties. each: whether they are those of one device."""
    plans = [row if "plan" in row else None for row in rows]
    return f.Series(
        name,
        [one["images_per_second"] / (plan_of(one).world_size if each else 1) if one else None for one in plans],
        [_share(one) if one else 0.0 for one in plans],
        [f"{title_of(one)}, {size(one['memory_bytes'])}" if one else "" for one in plans],
    )
