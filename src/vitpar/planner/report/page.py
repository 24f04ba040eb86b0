"""Reports of a search and of scaling as self-contained HTML pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape

from vitpar.pages import svg
from vitpar.pages.document import document, facts, table
from vitpar.pages.maps import layer_map, rank_grid
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.report.data import (
    COLUMNS,
    Findings,
    Provenance,
    assumptions,
    certainty,
    duration,
    figures,
    noise_words,
    plan_title,
    scaling_columns,
    scaling_notes,
    scaling_rows,
    schedule_words,
    speed_words,
)
from vitpar.planner.report.timeline import timeline
from vitpar.planner.search.gains import with_links
from vitpar.planner.search.ranking import form
from vitpar.planner.search.scaling import Point
from vitpar.planner.training_time import hours_name
from vitpar.text import size

SIMULATED = "Simulated with the best plan for each number of devices"
WORDS = {"weak": "fixed batch per device", "strong": "fixed total batch"}
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Factors on the speed of links in the sensitivity chart."""
SHOWN = 5
"""Number of plans whose timelines and breakdowns are shown."""
MOST_EVENTS = 4000
"""Maximum number of spans in a timeline; browsers are slow with more."""


def page(findings: Findings, moments: float) -> str:
    """Return the HTML page of a search. moments: bytes of optimizer state per byte of parameters."""
    best, result, costs, doubt = findings.result.plans[0], findings.result, findings.costs, findings.doubt
    title = f"{plan_title(best.plan)}, batch {best.batch_size:,}"
    noise = f'<p class="note">{escape(noise_words(doubt))}</p>' if doubt else ""
    parts = [
        f"<h1>{escape(costs.config.name)}: <code>{escape(str(best.plan))}</code>"
        f"<small>{escape(title.removeprefix(str(best.plan)))}</small></h1>",
        _facts(findings),
        f"<h2>Train it</h2><pre>{escape(findings.train)}</pre>" if findings.train else "",
        "<h2>Layers and ranks</h2>",
        layer_map(costs.config, best.plan),
        "<h2>Ranks on each axis</h2>",
        rank_grid(best.plan),
        "<h2>Plans</h2>",
        _table(findings),
        noise,
        "<h2>Speed and memory</h2>",
        _frontier(findings),
        "<h2>Breakdown of a step</h2>",
    ]
    for number, shown in enumerate(_unlike(findings)[:SHOWN]):
        parts.append(_plan(shown, findings, opened=number == 0))
    parts += [
        "<h2>Sensitivity to link speed</h2>",
        svg.lines(
            _sensitivity(_unlike(findings)[:SHOWN], costs, moments),
            [f"× {f:g}" for f in FACTORS],
            "samples/s",
            "Speed of the same plans if every link were this many times as fast",
        ),
        '<p class="note">Speed of the same plans if every link were this many times as fast.</p>',
        "<h2>Why not</h2>",
        '<div class="scroll"><table>',
        *(
            f"<tr><td><code>{escape(r.plan)}</code></td><td>{escape(findings.why(r))}</td></tr>"
            for r in findings.reasons
        ),
        "</table></div>",
        f'<p class="note">{result.seconds:.2f} s over {result.strategies:,} strategies and {result.outlines:,} '
        f"pipelines with micro-batches; {escape(certainty(result))}.</p>",
    ]
    return document(f"vitpar search: {title}", parts)


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


def _frontier(findings: Findings) -> str:
    """Return the chart of speed over memory, or a sentence if there is only one point."""
    best = findings.result.plans[0]
    if len(findings.frontier) < 2:
        return f"<p>No plan with less memory than {size(best.memory_bytes)} per rank was found.</p>"
    unit, scale = ("GB", 1e9) if best.memory_bytes >= 1e9 else ("MB", 1e6)
    points = [(p.memory_bytes / scale, p.images_per_second, plan_title(p.plan)) for p in findings.frontier]
    words = "The fastest plan for each amount of memory. Point at a dot to see its plan."
    return f'{svg.frontier(points, findings.budget / scale, unit)}<p class="note">{words}</p>'


def _table(findings: Findings) -> str:
    """Return the table of plans with their figures."""
    best, doubt = findings.result.plans[0], findings.doubt
    rows = [
        [f"<code>{escape(str(p.plan))}</code>{schedule_words(p.plan)}", *figures(p, best, doubt)]
        for p in findings.result.plans
    ]
    return table(["plan", *COLUMNS], rows, numbers=slice(1, None))


def _plan(priced: Price, findings: Findings, opened: bool) -> str:
    """Return the charts of a plan's memory, time and timeline. opened: whether they are unfolded at first."""
    memory = [
        (
            f"pp {place}" if len(priced.memory) > 1 else "memory",
            {n: v for n, v in asdict(m).items() if n != "host" and v},
        )
        for place, m in enumerate(priced.memory)
    ]
    time = {name: seconds for name, seconds in priced.time.items() if seconds > 1e-3 * priced.seconds}
    spans = timeline(priced, findings.costs)
    cut = f", the first {MOST_EVENTS} of {len(spans)} spans" if len(spans) > MOST_EVENTS else ""
    each = "the fullest rank at each pp index" if len(priced.memory) > 1 else "the fullest rank"
    return (
        f"<details{' open' * opened}><summary>{escape(plan_title(priced.plan))}: "
        f"{escape(speed_words(priced, findings.costs))}</summary>"
        f"<p>Memory of {each}</p>{svg.bars(memory, size, findings.budget)}"
        f"<p>Time of a step, for the rank that waits least</p>{svg.bars([('step', time)], duration)}"
        f"<p>Timeline of a step{cut}</p>{svg.timeline(spans[:MOST_EVENTS], priced.seconds)}</details>"
    )


def _unlike(findings: Findings) -> list[Price]:
    """Return the best plan and those other plans that fit, one for each form (`form`)."""
    kept: dict[tuple, Price] = {}
    for one in (*findings.result.plans, *(r.price for r in findings.reasons if r.price), *findings.frontier):
        if one.memory_bytes <= findings.budget or one is findings.result.plans[0]:
            kept.setdefault(form(one), one)
    return list(kept.values())


def _sensitivity(prices: list[Price], costs: LayerCosts, moments: float) -> dict[str, list[float]]:
    """Return the images per second of each plan by title, with all links faster by each of FACTORS."""
    rows: dict[str, list[float]] = {plan_title(p.plan): [] for p in prices}
    for factor in FACTORS:
        scaled = with_links(costs, factor)
        for one, values in zip(prices, rows.values(), strict=True):
            values.append(price(one.plan, scaled, one.batch_size, moments).images_per_second)
    return rows


def scaling_page(title: str, by_regime: Mapping[str, Sequence[Point]], costs: LayerCosts, origin: Provenance) -> str:
    """Return the HTML page of a scaling prediction: images per second per device, and the plans.

    by_regime: points by scaling regime, for the same numbers of ranks
    """
    points = next(iter(by_regime.values()))
    ticks = [str(point.ranks) for point in points]
    series = {
        f"{regime}: {WORDS[regime]}": [point.per_rank for point in points] for regime, points in by_regime.items()
    }
    notes = "; ".join((SIMULATED, *scaling_notes(by_regime, costs)))
    parts = [
        f"<h1>{escape(title)}</h1>",
        facts({**_source(costs, origin, points[-1].ranks), "figures": escape(notes)}),
        "<h2>Samples/s per device by number of devices</h2>",
        svg.lines(series, ticks, "samples/s", "Samples/s per device by number of devices"),
    ]
    for regime, points in by_regime.items():
        rows = [[*map(escape, row[:-1]), f"<code>{escape(row[-1])}</code>"] for row in scaling_rows(points, costs)]
        parts.append(f"<h2>{regime.capitalize()} scaling: {WORDS[regime]}</h2>")
        parts.append(table([*scaling_columns(points), "plan"], rows, numbers=slice(-1)))
    parts.append('<p class="note">gap: upper bound on how much faster any plan could be.</p>')
    return document(title, parts)
