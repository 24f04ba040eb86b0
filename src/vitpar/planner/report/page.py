"""Reports of a search and of scaling: HTML pages that need nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.report import svg
from vitpar.planner.report.data import COLUMNS, Findings, certainty, figures, plan_title, schedule_words
from vitpar.planner.search.expand import form
from vitpar.planner.search.scaling import Point, efficiency
from vitpar.text import count, size

SIMULATED = "Simulated, with the best plan for every number of devices"
WORDS = {"weak": "as many images for each device", "strong": "as many images in all"}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""By how much links could be faster."""
SHOWN = 5
"""Plans of the list whose timelines and breakdowns are shown."""
MOST_EVENTS = 4000
"""In a timeline: with more, a page is slow."""
STYLE = """
:root { color-scheme: light dark; --line: #8888; --faint: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.2rem; } code { font-size: .95em; }
svg { width: 100%; display: block; overflow: visible; } svg text { font-size: 12px; fill: currentColor; }
svg .small { font-size: 11px; opacity: .75; } svg .number { font-size: 10px; fill: #fff; }
svg .grid { stroke: var(--faint); } svg .limit { stroke: #d33; stroke-dasharray: 4 3; }
svg .line { fill: none; stroke: #4269d0; stroke-width: 2; }
svg .idle { fill: var(--faint); } svg .event { stroke: #fff8; stroke-width: .5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: 12px; margin: .4rem 0 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--faint); }
td.n, th.n { text-align: right; } .facts td:first-child { white-space: nowrap; opacity: .75; }
details { margin: .6rem 0; } summary { cursor: pointer; } .note { opacity: .75; font-size: 13px; }
"""


def page(found: Findings, costs: LayerCosts, moments: float) -> str:
    """The page of what `costs` says. moments: as `price` takes them."""
    best, result = found.result.plans[0], found.result
    unit, scale = ("GB", 1e9) if best.memory_bytes >= 1e9 else ("MB", 1e6)
    parts = [
        f"<h1>{escape(costs.config.name)}: <code>{escape(str(best.plan))}</code></h1>",
        _facts(found, costs),
        "<h2>Memory against speed</h2>",
        svg.frontier(
            [(p.memory_bytes / scale, p.images_per_second, str(p.plan)) for p in found.frontier],
            found.budget / scale,
            unit,
        ),
        '<p class="note">The fastest plan for each amount of memory. Point at a dot to see its plan.</p>',
        "<h2>Plans</h2>",
        _table(result.plans, best),
    ]
    for number, shown in enumerate(_unlike(found)[:SHOWN]):
        parts.append(_plan(shown, found.budget, unit, scale, opened=number == 0))
    parts += [
        "<h2>If links were slower or faster</h2>",
        svg.lines(_sensitivity(_unlike(found)[:SHOWN], costs, moments), [f"× {f:g}" for f in FACTORS], "images/s"),
        '<p class="note">The same plans, were every link so many times as fast.</p>',
        "<h2>Why not</h2>",
        "<table>",
        *(f"<tr><td><code>{escape(r.plan)}</code></td><td>{escape(r.why)}</td></tr>" for r in found.reasons),
        "</table>",
    ]
    return document(f"vitpar search: {best.plan}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(found: Findings, costs: LayerCosts) -> str:
    result, best = found.result, found.result.plans[0]
    rows = {
        "hardware": f"{best.plan.world_size} ranks of {costs.hardware.device_name} ({costs.hardware.name})",
        "precision": costs.model.precision,
        "figures": "; ".join(found.notes) or "measured on this machine",
        "speed": f"{best.images_per_second:,.1f} images/s, {best.seconds * 1e3:,.1f} ms a step of {best.batch_size}",
        "memory": f"{size(best.memory_bytes)} on the fullest rank, {size(found.budget)} allowed",
        "search": f"{result.seconds:.2f} s over {result.strategies:,} strategies and {result.kinds:,} pipelines with "
        f"micro-batches; {certainty(result)}",
    }
    cells = "".join(f"<tr><td>{name}</td><td>{escape(words)}</td></tr>" for name, words in rows.items())
    return f'<table class="facts">{cells}</table>'


def _table(prices: Sequence[Price], best: Price) -> str:
    rows = [
        [f"<code>{escape(str(found.plan))}</code>{schedule_words(found.plan)}", *figures(found, best)]
        for found in prices
    ]
    return table(["plan", *COLUMNS], rows, numbers=slice(1, None))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: slice) -> str:
    """A table of HTML cells. numbers: which columns are on the right."""
    right = range(len(headings))[numbers]

    def row(tag: str, cells: Sequence[str]) -> str:
        opened = (f'{tag} class="n"' if index in right else tag for index in range(len(cells)))
        return f"<tr>{''.join(f'<{t}>{cell}</{tag}>' for t, cell in zip(opened, cells, strict=True))}</tr>"

    return f"<table>{row('th', headings)}{''.join(row('td', cells) for cells in rows)}</table>"


def _plan(found: Price, budget: float, unit: str, scale: float, opened: bool) -> str:
    """One plan's memory, time and timeline."""
    memory = [
        (f"pp {place}", {n: v / scale for n, v in asdict(m).items() if n != "host" and v})
        for place, m in enumerate(found.memory)
    ]
    time = {name: seconds * 1e3 for name, seconds in found.time.items() if seconds > 1e-3 * found.seconds}
    shown = found.events[:MOST_EVENTS]
    cut = f", the first {MOST_EVENTS} of {len(found.events)} actions" if len(found.events) > MOST_EVENTS else ""
    return (
        f"<details{' open' * opened}><summary>{escape(plan_title(found.plan))}</summary>"
        f"<p>Memory of the fullest rank of every place on the pp axis</p>{svg.bars(memory, unit, budget / scale)}"
        f"<p>Time of a step, for the rank that waits least</p>{svg.bars([('step', time)], 'ms')}"
        f"<p>Timeline of a step{cut}</p>{svg.timeline(shown, found.seconds)}</details>"
    )


def _unlike(found: Findings) -> list[Price]:
    """The best plan, and others of another form."""
    kept: dict[tuple, Price] = {}
    for one in (*found.result.plans, *(r.price for r in found.reasons if r.price), *found.frontier):
        if one.memory_bytes <= found.budget or one is found.result.plans[0]:
            kept.setdefault(form(one), one)
    return list(kept.values())


def _sensitivity(prices: list[Price], costs: LayerCosts, moments: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {plan_title(p.plan): [] for p in prices}
    for factor in FACTORS:
        links = tuple(link.slower(1 / factor) for link in costs.hardware.links)
        scaled = LayerCosts(costs.config, costs.hardware.model_copy(update={"links": links}), costs.model)
        for one, values in zip(prices, found.values(), strict=True):
            values.append(price(one.plan, scaled, one.batch_size, moments).images_per_second)
    return found


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
        parts += [f"<h2>{kind.capitalize()} scaling: {WORDS[kind]}</h2>", _scaling_table(points)]
    return document(title, parts)


def _scaling_table(points: Sequence[Point]) -> str:
    rows = []
    for point, part in zip(points, efficiency(points), strict=True):
        speed = f"{point.price.images_per_second:,.0f}" if point.price else ""
        share, gap = ("", "") if part is None else (f"{part:.1%}", f"{point.gap:.1%}")
        plan = "no plan fits"
        if point.price is not None:
            plan = f"{point.price.plan}, {count(point.price.plan.microbatches or 1, 'micro-batch')}"
        rows.append([str(point.ranks), str(point.batch_size), speed, share, gap, escape(plan)])
    headings = ["devices", "batch", "images/s", "efficiency", "at most better by", "plan"]
    return table(headings, rows, numbers=slice(-1))
