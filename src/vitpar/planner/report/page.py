"""Reports of a search and of scaling as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.report import svg
from vitpar.planner.report.data import (
    COLUMNS,
    SCALING_COLUMNS,
    Findings,
    Provenance,
    certainty,
    duration,
    figures,
    noise_words,
    plan_title,
    provenance,
    scaling_rows,
    schedule_words,
    speed_words,
)
from vitpar.planner.report.maps import layer_map, rank_grid
from vitpar.planner.report.timeline import timeline
from vitpar.planner.search.expand import form
from vitpar.planner.search.scaling import Point
from vitpar.text import size

SIMULATED = "Simulated with the best plan for each number of devices"
WORDS = {"weak": "fixed batch per device", "strong": "fixed total batch"}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors on the speed of links in the sensitivity chart."""
SHOWN = 5
"""Number of plans whose timelines and breakdowns are shown."""
MOST_EVENTS = 4000
"""Maximum number of spans in a timeline; browsers are slow with more."""
STYLE = """
:root { color-scheme: light dark; --faint: #8883; --accent: light-dark(#14507f, #8cc8f5); }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.35rem; line-height: 1.3; } h2 { font-size: 1.1rem; margin-top: 2.2rem; }
code { font-size: .95em; overflow-wrap: anywhere; } h1 small { font-weight: normal; }
.scroll { overflow-x: auto; } svg { width: 100%; min-width: 600px; display: block; }
svg text { font-size: 12px; fill: currentColor; } svg .small { font-size: 11px; opacity: .8; }
svg text.number { font-size: 10px; } svg text.number[fill="#fff"] { fill: #fff; }
svg text.number[fill="#000"] { fill: #000; }
svg .grid { stroke: var(--faint); } svg .limit { stroke: #d33; stroke-dasharray: 4 3; }
svg .line { fill: none; stroke: var(--accent); stroke-width: 1.6; } svg .dot, svg .mark { fill: var(--accent); }
svg .idle { fill: var(--faint); } svg .event { stroke: #fff8; stroke-width: .5; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: 12px; margin: .3rem 0 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border: 1px solid #8888; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--faint); }
td.n, th.n { text-align: right; white-space: nowrap; }
.facts td { min-width: 0; } .facts td:first-child { white-space: nowrap; opacity: .75; vertical-align: top; }
.ranks { width: auto; } .ranks td { text-align: center; padding: .25rem .6rem; border: 1px solid var(--faint); }
.ranks small { white-space: nowrap; } .ranks th { border: 0; white-space: nowrap; }
td:has(code) { min-width: 13rem; }
pre { background: var(--faint); padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; border-radius: 4px; }
details { margin: .6rem 0; } summary { cursor: pointer; } .note { opacity: .8; font-size: 13px; }
"""


def page(found: Findings, moments: float) -> str:
    """Return the HTML page of a search. moments: bytes of optimizer state per byte of parameters."""
    best, result, costs, doubt = found.result.plans[0], found.result, found.costs, found.doubt
    title = f"{plan_title(best.plan)}, batch {best.batch_size:,}"
    noise = f'<p class="note">{escape(noise_words(doubt))}</p>' if doubt else ""
    parts = [
        f"<h1>{escape(costs.config.name)}: <code>{escape(str(best.plan))}</code>"
        f"<small>{escape(title.removeprefix(str(best.plan)))}</small></h1>",
        _facts(found),
        f"<h2>Train it</h2><pre>{escape(found.train)}</pre>" if found.train else "",
        "<h2>Layers and ranks</h2>",
        layer_map(costs.config, best.plan),
        "<h2>Ranks on each axis</h2>",
        rank_grid(best.plan),
        "<h2>Plans</h2>",
        _table(found),
        noise,
        "<h2>Speed and memory</h2>",
        _frontier(found),
        "<h2>Breakdown of a step</h2>",
    ]
    for number, shown in enumerate(_unlike(found)[:SHOWN]):
        parts.append(_plan(shown, found, opened=number == 0))
    parts += [
        "<h2>Sensitivity to link speed</h2>",
        svg.lines(
            _sensitivity(_unlike(found)[:SHOWN], costs, moments),
            [f"× {f:g}" for f in FACTORS],
            "images/s",
            "Speed of the same plans if every link were this many times as fast",
        ),
        '<p class="note">Speed of the same plans if every link were this many times as fast.</p>',
        "<h2>Why not</h2>",
        '<div class="scroll"><table>',
        *(f"<tr><td><code>{escape(r.plan)}</code></td><td>{escape(found.why(r))}</td></tr>" for r in found.reasons),
        "</table></div>",
        f'<p class="note">{result.seconds:.2f} s over {result.strategies:,} strategies and {result.kinds:,} pipelines '
        f"with micro-batches; {escape(certainty(result))}.</p>",
    ]
    return document(f"vitpar search: {title}", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """Return a complete HTML page with the given title and parts of its body."""
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{view}<title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(found: Findings) -> str:
    """Return the table of facts about the best plan."""
    best, costs, doubt = found.result.plans[0], found.costs, found.doubt
    figures = [*(found.notes or ("measured",)), *([doubt.source] if doubt else [])]
    return _about(
        {
            "speed": escape(speed_words(best, costs)),
            "memory": escape(f"{size(best.memory_bytes)} on the fullest rank, of {size(found.budget)} allowed"),
            **_source(costs, found.origin, best.plan.world_size),
            "figures": "<br>".join(map(escape, figures)),
        }
    )


def _source(costs: LayerCosts, origin: Provenance, ranks: int) -> dict[str, str]:
    """Return rows of `_about`: hardware, precision and the command."""
    compiled = ", compiled" if costs.model.compiled else ""
    return {
        "hardware": escape(f"{ranks} ranks of {costs.hardware.device_name} ({costs.hardware.name})"),
        "precision": escape(f"{costs.model.precision}{compiled}"),
        "made by": f"vitpar {escape(origin.version)}: <code>{escape(origin.command)}</code>",
    }


def _about(rows: Mapping[str, str]) -> str:
    """Return a table with a row for each name and its HTML."""
    cells = "".join(f"<tr><td>{name}</td><td>{words}</td></tr>" for name, words in rows.items())
    return f'<table class="facts">{cells}</table>'


def _frontier(found: Findings) -> str:
    """Return the chart of speed over memory, or a sentence if there is only one point."""
    best = found.result.plans[0]
    if len(found.frontier) < 2:
        return f"<p>No plan with less memory than {size(best.memory_bytes)} per rank was found.</p>"
    unit, scale = ("GB", 1e9) if best.memory_bytes >= 1e9 else ("MB", 1e6)
    points = [(p.memory_bytes / scale, p.images_per_second, plan_title(p.plan)) for p in found.frontier]
    words = "The fastest plan for each amount of memory. Point at a dot to see its plan."
    return f'{svg.frontier(points, found.budget / scale, unit)}<p class="note">{words}</p>'


def _table(found: Findings) -> str:
    """Return the table of plans with their figures."""
    best, doubt = found.result.plans[0], found.doubt
    rows = [
        [f"<code>{escape(str(p.plan))}</code>{schedule_words(p.plan)}", *figures(p, best, doubt)]
        for p in found.result.plans
    ]
    return table(["plan", *COLUMNS], rows, numbers=slice(1, None))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numbers: slice) -> str:
    """Return a table of HTML cells. numbers: columns that are right-aligned."""
    right = range(len(headings))[numbers]

    def row(tag: str, cells: Sequence[str]) -> str:
        opened = (f'{tag} class="n"' if index in right else tag for index in range(len(cells)))
        return f"<tr>{''.join(f'<{t}>{cell}</{tag}>' for t, cell in zip(opened, cells, strict=True))}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="scroll"><table>{row("th", headings)}{body}</table></div>'


def _plan(price: Price, found: Findings, opened: bool) -> str:
    """Return the charts of a plan's memory, time and timeline. opened: whether they are unfolded at first."""
    memory = [
        (
            f"pp {place}" if len(price.memory) > 1 else "memory",
            {n: v for n, v in asdict(m).items() if n != "host" and v},
        )
        for place, m in enumerate(price.memory)
    ]
    time = {name: seconds for name, seconds in price.time.items() if seconds > 1e-3 * price.seconds}
    spans = timeline(price, found.costs)
    cut = f", the first {MOST_EVENTS} of {len(spans)} spans" if len(spans) > MOST_EVENTS else ""
    each = "the fullest rank at each pp index" if len(price.memory) > 1 else "the fullest rank"
    return (
        f"<details{' open' * opened}><summary>{escape(plan_title(price.plan))}: "
        f"{escape(speed_words(price, found.costs))}</summary>"
        f"<p>Memory of {each}</p>{svg.bars(memory, size, found.budget)}"
        f"<p>Time of a step, for the rank that waits least</p>{svg.bars([('step', time)], duration)}"
        f"<p>Timeline of a step{cut}</p>{svg.timeline(spans[:MOST_EVENTS], price.seconds)}</details>"
    )


def _unlike(found: Findings) -> list[Price]:
    """Return the best plan and those other plans that fit, one for each form (`form`)."""
    kept: dict[tuple, Price] = {}
    for one in (*found.result.plans, *(r.price for r in found.reasons if r.price), *found.frontier):
        if one.memory_bytes <= found.budget or one is found.result.plans[0]:
            kept.setdefault(form(one), one)
    return list(kept.values())


def _sensitivity(prices: list[Price], costs: LayerCosts, moments: float) -> dict[str, list[float]]:
    """Return the images per second of each plan by title, with all links faster by each of FACTORS."""
    found: dict[str, list[float]] = {plan_title(p.plan): [] for p in prices}
    for factor in FACTORS:
        links = tuple(link.slower(1 / factor) for link in costs.hardware.links)
        hardware = costs.hardware.model_copy(update={"links": links})
        scaled = LayerCosts(costs.whole, hardware, costs.model, costs.frozen)
        for one, values in zip(prices, found.values(), strict=True):
            values.append(price(one.plan, scaled, one.batch_size, moments).images_per_second)
    return found


def scaling_page(title: str, found: Mapping[str, Sequence[Point]], costs: LayerCosts, origin: Provenance) -> str:
    """Return the HTML page of a scaling prediction: images per second per device, and the plans.

    found: points by kind of scaling, for the same numbers of ranks
    """
    points = next(iter(found.values()))
    ticks = [str(point.ranks) for point in points]
    series = {f"{kind}: {WORDS[kind]}": [point.per_rank for point in points] for kind, points in found.items()}
    notes = "; ".join((SIMULATED, *provenance(costs.hardware, costs.model)))
    parts = [
        f"<h1>{escape(title)}</h1>",
        _about({**_source(costs, origin, points[-1].ranks), "figures": escape(notes)}),
        "<h2>Images/s per device by number of devices</h2>",
        svg.lines(series, ticks, "images/s", "Images/s per device by number of devices"),
    ]
    for kind, points in found.items():
        rows = [[*map(escape, row[:-1]), f"<code>{escape(row[-1])}</code>"] for row in scaling_rows(points, costs)]
        parts.append(f"<h2>{kind.capitalize()} scaling: {WORDS[kind]}</h2>")
        parts.append(table([*SCALING_COLUMNS, "plan"], rows, numbers=slice(-1)))
    parts.append('<p class="note">gap: upper bound on how much faster any plan could be.</p>')
    return document(title, parts)
