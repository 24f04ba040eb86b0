"""The report of a search: one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.profile.hardware import Hardware
from vitpar.planner.report import svg
from vitpar.planner.report.data import Findings
from vitpar.planner.search.expand import form
from vitpar.strategy.words import count, size

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
        f"micro-batches; {'no plan is faster by 0.1 %' if result.exact else 'not every plan was looked at'}; no mix of "
        f"strategies can be faster by more than {result.gap:.2%}",
    }
    cells = "".join(f"<tr><td>{name}</td><td>{escape(words)}</td></tr>" for name, words in rows.items())
    return f'<table class="facts">{cells}</table>'


def _table(prices: tuple[Price, ...], best: Price) -> str:
    names = ("micro-batches", "images/s", "beside the best", "a rank")
    rows = ["<tr><th>plan</th>" + "".join(f'<th class="n">{name}</th>' for name in names) + "</tr>"]
    for found in prices:
        schedule = f" {found.plan.schedule}" if found.plan.pipeline_degree > 1 else ""
        figures = (
            f"{found.plan.microbatches}",
            f"{found.images_per_second:,.1f}",
            f"{found.images_per_second / best.images_per_second - 1:+.1%}",
            size(found.memory_bytes),
        )
        cells = "".join(f'<td class="n">{figure}</td>' for figure in figures)
        rows.append(f"<tr><td><code>{escape(str(found.plan))}</code>{schedule}</td>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


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
        f"<details{' open' * opened}><summary>{escape(_words(found))}"
        f"</summary>"
        f"<p>Memory of the fullest rank of every place on the pp axis</p>{svg.bars(memory, unit, budget / scale)}"
        f"<p>Time of a step, for the rank that waits least</p>{svg.bars([('step', time)], 'ms')}"
        f"<p>Timeline of a step{cut}</p>{svg.timeline(shown, found.seconds)}</details>"
    )


def _words(found: Price) -> str:
    schedule = f" {found.plan.schedule}" if found.plan.pipeline_degree > 1 else ""
    return f"{found.plan}{schedule}, {count(found.plan.microbatches or 1, 'micro-batch')}"


def _unlike(found: Findings) -> list[Price]:
    """The best plan, and others of another form."""
    kept: dict[tuple, Price] = {}
    for one in (*found.result.plans, *(r.price for r in found.reasons if r.price), *found.frontier):
        if one.memory_bytes <= found.budget or one is found.result.plans[0]:
            kept.setdefault(form(one), one)
    return list(kept.values())


def _sensitivity(prices: list[Price], costs: LayerCosts, moments: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {_words(p): [] for p in prices}
    for factor in FACTORS:
        scaled = LayerCosts(costs.config, scaled_links(costs.hardware, factor), costs.model)
        for one, values in zip(prices, found.values(), strict=True):
            values.append(price(one.plan, scaled, one.batch_size, moments).images_per_second)
    return found


def scaled_links(hardware: Hardware, factor: float) -> Hardware:
    """The same machine, every link `factor` times as fast."""

    links = tuple(link.slower(1 / factor) for link in hardware.links)
    return hardware.model_copy(update={"links": links})
