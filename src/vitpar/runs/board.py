"""First page of a board: a table of the runs in a folder, and the results of runs that differ in their seed alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from vitpar.runs.folder import SEED, RunRecord, seed_groups
from vitpar.runs.page import MOST_RUNS, STYLE
from vitpar.runs.pages.document import table
from vitpar.runs.pages.plotly import Charts
from vitpar.tasks.task import LOSS
from vitpar.text import count, rough_duration, shown

BACK = '<a href="/">all runs</a>'
"""Link from the page of runs to the board."""
_HEADS = ("", "run", "state", "steps", "loss", "metric", "samples/s", "age", "plan", "model", "data")
_NUMBERS = slice(3, 8)


def board(folder: Path, runs: Sequence[RunRecord], *, made_by: str = "", version: str = "") -> str:
    """Return the page.

    runs: those in `folder`, the newest first, each with its newest metrics.
    made_by, version: as for ``vitpar.runs.page.report``.
    """
    rows = [_row(run) for run in runs]
    parts = [
        f"<h1>{escape(shown(folder))}</h1>",
        f"<p>{count(len(runs), 'run')}. A heading sorts; the name of a run opens its page.</p>",
        f'<form action="/" class="runs">{table(_HEADS, rows, _NUMBERS)}'
        f"<button>compare up to {MOST_RUNS} marked runs</button></form>",
        *_seeds(runs),
        f'<p class="note">{escape(made_by)}</p>' if made_by else "",
    ]
    return Charts().page(f"vitpar board: {folder}", parts, STYLE + BOARD_STYLE, version)


def _row(run: RunRecord) -> list[str]:
    """Return the cells of a run as HTML; ``data-by`` is the number that a column is sorted by."""
    name, metric = escape(shown(run.name)), run.metric
    value = None if metric is None else run.last(metric.name)
    named = "–" if value is None or metric is None else escape(f"{shown(metric.words)} {metric.shown(value, True)}")
    loss, rate, steps, total = run.loss, run.images_per_second, run.metrics.steps, run.total_steps
    note = f' title="{escape(shown(run.note))}"' if run.note else ""
    return [
        f'<input type="checkbox" name="run" value="{name}" id="board/{name}" aria-label="compare {name}">',
        f'<a href="/?{escape(urlencode({"run": run.name}, errors="replace"))}">{name}</a>',
        f'<span class="state {run.state}"{note}>{run.state}</span>',
        _sorted_by(steps, f"{steps:,}" if total in (None, steps) else f"{steps:,} of {total:,}"),
        _sorted_by(loss, "–" if loss is None else f"{loss:.4f}"),
        _sorted_by(value, named),
        _sorted_by(rate, "–" if rate is None else f"{rate:,.0f}"),
        _sorted_by(run.age_seconds, rough_duration(run.age_seconds)),
        f"<code>{escape(shown(run.plan_words))}</code>",
        *(escape(Path(shown(run.recipe.get(key, "?"))).name) for key in ("model.name", "data.path")),
    ]


def _sorted_by(number: float | None, words: str) -> str:
    return words if number is None else f'<span data-by="{number:.12g}">{words}</span>'


def _seeds(runs: Iterable[RunRecord]) -> list[str]:
    """Return the table of groups of complete runs that differ in their seed alone; nothing without one."""
    complete = [run for run in runs if run.state == "complete"]
    rows = []
    for numbers in seed_groups(complete):
        group = [complete[number] for number in numbers]
        query = escape(urlencode([("run", run.name) for run in group[:MOST_RUNS]], errors="replace"))
        metrics = [LOSS, *filter(None, [group[0].metric])]
        results = []
        for metric in metrics:
            values = [value for run in group if (value := run.last(metric.name)) is not None]
            mean = metric.shown(statistics.fmean(values), True) if values else "–"
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            results.append(f"{shown(metric.words)} {mean} ± {metric.shown(float(f'{spread:.2g}'), True)}")
        model, data = (Path(shown(group[0].recipe.get(key, "?"))).name for key in ("model.name", "data.path"))
        words = f"{model} on {data} under {shown(group[0].plan_words)}"
        seeds = ", ".join(sorted(str(run.recipe.get(SEED)) for run in group))
        rows.append([f'<a href="/?{query}">{escape(words)}</a>', escape(seeds), *map(escape, results)])
    if not rows:
        return []
    heads = ["runs that differ in their seed alone", "seeds", "loss, mean ± deviation", "metric, mean ± deviation"]
    return ["<h2>Seeds</h2>", table(heads, rows)]


BOARD_STYLE = """
.runs th button { all: unset; cursor: pointer; } .runs th button:focus-visible { outline: 2px solid var(--accent); }
.runs th[aria-sort=ascending] button::after { content: " ▲"; }
.runs th[aria-sort=descending] button::after { content: " ▼"; }
.runs td, .runs td code { white-space: nowrap; } .runs td:has(code) { min-width: 0; }
.runs > button { margin-top: .6rem; font: inherit; padding: .2rem .8rem; }
"""
"""Rules of style of the first page, besides those of reports."""
