"""Report of one or several runs as a self-contained HTML page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

import numpy as np

from vitpar.errors import UserError
from vitpar.models import ModelConfig
from vitpar.recipe import read_recipe
from vitpar.runs.charts import AXES, SMOOTHING, charts, percent
from vitpar.runs.folder import RunRecord, seed_groups
from vitpar.runs.pages.document import facts, switch, table, toggles
from vitpar.runs.pages.figures import SERIES, series_colour, timeline
from vitpar.runs.pages.maps import placement, rank_grid
from vitpar.runs.pages.plotly import Charts, Key
from vitpar.runs.predictions import SHEET_STYLE
from vitpar.strategy import Plan
from vitpar.tasks.task import LOSS, Metric
from vitpar.text import count, shown, size

HYPHEN = "\u2011"
"""Hyphen at which no line breaks."""
MOST_RUNS = len(SERIES)
"""Maximum number of runs in a report: one for each colour."""
MOST_SHOWN = 12
"""Maximum number of settings in which runs differ that are shown at once; the others are folded."""
MOST_RESTARTS = 5
"""Number of the newest restarts that the summary names."""
MOST_ACTIONS = 50_000
"""Maximum number of actions of a pipeline that are replayed."""
MOST_PLACES = 1 << 15
"""Maximum number of ranks of a plan, times its stages or its distinct strategies, that are looked at."""
DASHED = '<b class="k dash"></b>validation'
"""Key of lines of evaluations."""


def report(runs: Sequence[RunRecord], *, made_by: str = "", extra: str = "", version: str = "", above: str = "") -> str:
    """Return the page.

    made_by: version and command that made it.
    extra: HTML of further sections.
    version: as for ``vitpar.runs.pages.document.document``.
    above: HTML above the title.

    Raises DataError for a run whose metrics cannot be read.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    page, drawn = charts(runs)
    parts = [
        above,
        f"<h1>{escape(title)}</h1>",
        _summary(runs),
        "<h2>Charts</h2>",
        _controls(runs, drawn),
        f'<div class="charts">{"".join(drawn)}</div>' if drawn else "<p>No step has been recorded yet.</p>",
        extra,
        _plans(runs, page),
        _differences(runs) if len(runs) > 1 else _settings(runs[0]),
        _reproduce(runs),
        f'<p class="note">{escape(made_by)}</p>' if made_by else "",
    ]
    return page.page(f"vitpar report: {title}", parts, STYLE + SHEET_STYLE * bool(extra), version)


def _summary(runs: Sequence[RunRecord]) -> str:
    """Return the table of results, with a column for each run."""
    columns = [_results(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if len(runs) == 1:
        return facts({name: _unbroken(words) for name, words in columns[0].items() if words})
    heads = ["", *(_key(number, run) for number, run in enumerate(runs))]
    rows = [[escape(name), *(_unbroken(column.get(name) or "–") for column in columns)] for name in names]
    kept = [row for row in rows if any(cell != "–" for cell in row[1:])]
    return f'<div class="summary">{table(heads, kept)}</div>'


def _results(run: RunRecord) -> dict[str, str]:
    """Return the facts about a run as HTML by name; empty ones are unknown."""
    metrics, start = run.metrics, run.events.starts[-1] if run.events.starts else None
    total = f" of {start.steps:,}" if start and start.steps != metrics.steps else ""
    data, path = "", run.recipe.get("data.path")
    if start is not None:
        name = f"{shown(path)}: " if isinstance(path, str) else ""
        sets = f"{start.train_samples:,} training and {start.val_samples:,} validation images"
        data = f"{name}{sets}, {start.batch_size:,} a step"
    loss = run.last("loss")
    parts = [] if loss is None else [f"loss {loss:.4f}"]
    parts += [
        f"{_name(metric)} {metric.shown(run.last(metric.name), brief=True)}" for metric in run.task_metrics[:2] if parts
    ]
    train_loss, hours, rate = run.last("loss", "train"), run.last("hours", "train"), run.images_per_second
    memory, mfu = run.last("memory_bytes", "train"), run.last("mfu", "train")
    peak, ranks = "" if memory is None else f"{size(memory)} at most on rank 0", metrics.memory
    if memory is not None and len(ranks) > 1 and np.isfinite(ranks).all():
        most, least = int(ranks.argmax()), int(ranks.argmin())
        peak = f"at most {size(ranks[most])} on rank {most}, {size(ranks[least])} on rank {least}"
    wrong = int((metrics.train["skipped"] > 0).sum()), int((~np.isfinite(metrics.train["loss"])).sum())
    oddities = [f"{count(wrong[0], 'step')} skipped"] if wrong[0] else []
    oddities += [f"{count(wrong[1], 'step')} without a finite loss"] if wrong[1] else []
    oddities += [f"{count(metrics.damaged, 'line')} of metrics.jsonl cannot be read"] if metrics.damaged else []
    return {
        "state": f'<span class="state {run.state}">{run.state}</span>',
        "note": escape(shown(run.note)),
        "validation": escape(", ".join(parts)),
        **_best(run),
        "training loss": "" if train_loss is None else f"{train_loss:.4f}",
        "steps": f"{metrics.steps:,}{total}",
        "training time": "" if hours is None else _duration(hours),
        "speed": "" if rate is None else f"{rate:,.{0 if rate >= 100 else 1}f} samples/s on average",
        "MFU": "" if mfu is None else percent(mfu),
        "memory": peak,
        "plan": f"<code>{escape(shown(run.plan_words))}</code>",
        "model": "" if start is None else f"{escape(shown(start.model))}, {start.parameters / 1e6:,.3g} M parameters",
        "data": escape(data),
        "devices": escape(_devices(run)),
        "checkpoints": f"{len(run.events.saves):,} saved" if run.events.saves else "",
        "restarts": _restarts(run),
        "metrics": escape(", ".join(oddities)),
    }


def _best(run: RunRecord) -> dict[str, str]:
    """Return the best value of the task's first metric, by what it is; empty if there is none."""
    metric = run.metric or LOSS
    steps, values = run.metrics.eval["step"], run.metrics.eval[metric.name]
    if not np.isfinite(values).any():
        return {}
    index = int(np.where(np.isfinite(values), values if metric.higher else -values, -np.inf).argmax())
    words = f"{metric.shown(float(values[index]), brief=True)} after step {steps[index]:,.0f}"
    return {f"best {_name(metric)}": escape(words)}


def _name(metric: Metric) -> str:
    """Return the name of a metric, which is not broken at hyphens."""
    return shown(metric.words).replace("-", HYPHEN)


def _restarts(run: RunRecord) -> str:
    """Return the plans between which a run was restarted."""
    again = [start for start in run.events.starts if start.step]
    earlier = f"{len(again) - MOST_RESTARTS:,} earlier; " if len(again) > MOST_RESTARTS else ""
    return earlier + "; ".join(
        f"after step {start.step:,} under <code>{escape(shown(start.plan))}</code>"
        f"{escape(start.changed and f': {start.changed}')}"
        for start in again[-MOST_RESTARTS:]
    )


def _devices(run: RunRecord) -> str:
    """Return the devices of a run, as in `8 ranks of cuda (NVIDIA H100)`."""
    start, names = run.events.starts[-1] if run.events.starts else None, run.environment.get("devices")
    kinds = dict.fromkeys(name for name in names if isinstance(name, str)) if isinstance(names, list) else {}
    plan = run.plan
    ranks = count(plan.world_size, "rank") if plan is not None and not plan.is_open else ""
    device = start.device.partition(":")[0] if start else ""
    cores = run.environment.get("cpu_count")
    machine = ", ".join(map(shown, kinds)) or (f"{cores} cores" if isinstance(cores, int) else "")
    words = " of ".join(filter(None, (ranks, device)))
    return f"{words} ({machine})" if machine else words


def _controls(runs: Sequence[RunRecord], drawn: Sequence[str]) -> str:
    """Return the switches and the legend of the charts."""
    if not drawn:
        return ""
    marked = any(run.events.saves or any(start.step for start in run.events.starts) for run in runs)
    evaluated = any(len(run.metrics.eval["step"]) for run in runs)
    lines = {f"run-{number}": _key(number, run) for number, run in enumerate(runs)} if len(runs) > 1 else {}
    lines |= {"kind-training": '<b class="k"></b>training', "kind-validation": DASHED} if evaluated else {}
    lines |= {"marks": "▲ checkpoints, ▼ restarts"} if marked else {}
    lines |= {"bands": "mean ± deviation of seeds"} if seed_groups(runs) else {}
    return (
        '<div class="controls">'
        f"{switch('x', 'over', {axis: axis for axis in AXES})}"
        f"{switch('smooth', 'smoothing', {name: name for name in SMOOTHING}, 'light')}"
        f"{switch('scale', 'scale', {'usual': 'usual', 'linear': 'linear', 'log': 'logarithmic'})}"
        f"{toggles(lines)}</div>"
    )


def _key(number: int, run: RunRecord) -> str:
    """Return the name of a run with its colour and number."""
    return Key(f"{number + 1} {shown(run.name)}", series_colour(number)).html


def _plans(runs: Sequence[RunRecord], page: Charts) -> str:
    """Return the pictures of the plans, one for each distinct plan of a model."""
    names: dict[tuple[Plan, ModelConfig | None], set[str]] = {}
    for run in runs:
        if run.plan is not None:
            names.setdefault((run.plan, _config_of(run)), set()).add(run.plan_words)
    drawn = []
    for plan, words in names.items():
        named = ", ".join(f"<code>{escape(shown(one))}</code>" for one in sorted(words))
        drawn.append((named, _plan_pictures(*plan, page)))
    if len(drawn) == 1:
        return f"<h2>Plan</h2><p>{drawn[0][0]}</p>{drawn[0][1]}"
    folded = (
        f"<details{' open' * (number == 0)}><summary>{words}</summary>{pictures}</details>"
        for number, (words, pictures) in enumerate(drawn)
    )
    return f"<h2>Plans</h2>{''.join(folded)}" if drawn else ""


def _plan_pictures(plan: Plan, config: ModelConfig | None, page: Charts) -> str:
    """Return the HTML of a plan's pictures.

    config: configuration of the model, for the map of layers; None leaves the map out.
    page: page that the timeline is added to.
    """
    if plan.world_size == 1:
        return "<p>Rank 0 holds the complete model and batch.</p>"
    if plan.world_size * max(plan.num_stages, len(plan.distinct)) > MOST_PLACES:
        return f"<p>The plan has {plan.world_size:,} ranks: too many to draw.</p>"
    try:
        drawn = placement(plan, config) or rank_grid(plan)
        return drawn + (_pipeline(plan, page) if plan.pipeline_degree > 1 else "")
    except UserError as error:  # a plan that was edited, or that does not fit the recipe
        return f"<p>The plan cannot be drawn: {escape(str(error))}.</p>"


def _pipeline(plan: Plan, page: Charts) -> str:
    """Return the timeline of a plan's pipeline in theory.

    It assumes equal stages, a backward twice as long as the forward, and free communication.
    """
    from vitpar.planner.cost.pipeline import ideal_events, idle_share
    from vitpar.planner.report.timeline import spans_of
    from vitpar.strategy.pipeline_orders import action_order

    batches = plan.microbatches or 1
    if 3 * batches * plan.num_stages > MOST_ACTIONS:
        return f"<p>A step has {batches:,} micro-batches in {plan.num_stages:,} stages: too many to draw.</p>"
    events = ideal_events(action_order(plan, batches), plan.num_stages)
    note = (
        f"{plan.schedule}, {batches:,} micro-batches, in theory {idle_share(plan, batches) * 100:.1f} % of the time "
        "idle: equal stages, a backward twice as long as the forward (1 unit), free communication."
    )
    return page.add(timeline("Pipeline of a step", spans_of(events), events[-1].end, unit="", note=note))


def _config_of(run: RunRecord) -> ModelConfig | None:
    """Return the configuration of a run's model; None for a model of the user's own, or a damaged recipe."""
    try:
        # The number of classes changes neither layers nor ranks.
        return read_recipe(run.path / "recipe.toml").config(num_classes=1000)
    except (UserError, OSError):
        return None


def _settings(run: RunRecord) -> str:
    """Return the settings of a run that are not the defaults, and its complete recipe, folded."""
    try:
        recipe = read_recipe(run.path / "recipe.toml")
    except (UserError, OSError):
        return ""
    sections = recipe.model_dump(mode="json", exclude_defaults=True).items()
    parts = {name: (f"{key} = {value}" for key, value in settings.items()) for name, settings in sections}
    given = facts({name: ", ".join(f"<code>{escape(shown(one))}</code>" for one in parts[name]) for name in parts})
    folded = f"<details><summary>complete recipe</summary><pre>{escape(recipe.to_toml())}</pre></details>"
    return f"<h2>Settings</h2><p>Those that are not the defaults.</p>{given}{folded}"


def _differences(runs: Sequence[RunRecord]) -> str:
    """Return the table of settings in which the recipes differ."""
    keys = dict.fromkeys(key for run in runs for key in run.recipe)
    settings = {key: [shown(run.recipe.get(key, "not set")) for run in runs] for key in keys}
    rows = [
        [f"<code>{escape(shown(key))}</code>", *map(escape, values)]
        for key, values in settings.items()
        if len(set(values)) > 1
    ]
    heads = ["setting", *(_key(number, run) for number, run in enumerate(runs))]
    more = rows[MOST_SHOWN:]
    folded = f"<details><summary>{count(len(more), 'setting')} more</summary>{table(heads, more)}</details>"
    first = table(heads, rows[:MOST_SHOWN]) if rows else "<p>All settings are equal.</p>"
    return f"<h2>Differences between the recipes</h2>{first}{folded if more else ''}"


def _reproduce(runs: Sequence[RunRecord]) -> str:
    """Return the commands of every run, and the versions, once if they are equal."""
    parts = ["<h2>Reproduce</h2>"]
    versions = [facts(_versions(run)) for run in runs]
    for number, run in enumerate(runs):
        parts.append(f"<h3>{_key(number, run)}</h3>" if len(runs) > 1 else "")
        resumed = any(start.step for start in run.events.starts)
        again = "<p>The run was resumed. To repeat it, stop each command after the last step of its part:</p>"
        parts.append(again if resumed else f"<pre>{escape(run.repeating_command)}</pre>")
        given = ((f"after step {after:,}" * bool(after), words) for after, words in run.commands.items())
        parts.append(facts({when or "started by": f"<code>{escape(words)}</code>" for when, words in given}))
        parts.append(versions[number] if len(set(versions)) > 1 or len(runs) == 1 else "")
    if len(runs) > 1 and len(set(versions)) == 1:
        parts.append(f"<h3>All runs</h3>{versions[0]}")
    return "".join(parts)


def _versions(run: RunRecord) -> dict[str, str]:
    """Return the versions of env.json as HTML, by name; only known ones."""
    found = run.environment
    attention, compiled = found.get("attention"), found.get("compiled")
    versions = {
        "vitpar": f"commit {found['git_commit']}" if found.get("git_commit") else None,
        "torch": found.get("torch"),
        "Python": found.get("python"),
        "system": found.get("platform"),
        "attention": attention.get("backend") if isinstance(attention, dict) else None,
        "blocks": ("not compiled", "compiled")[compiled] if isinstance(compiled, bool) else None,
        "threads": found.get("threads"),
    }
    return {name: escape(shown(value)) for name, value in versions.items() if isinstance(value, str | int)}


def _duration(hours: float) -> str:
    """Return a duration such as `2 h 05 min`, `3 min 32 s` or `4.7 s`."""
    seconds = hours * 3600
    minutes, second = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{seconds:.1f} s"
    return f"{minutes} min {second:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def _unbroken(html: str) -> str:
    """Return HTML in which numbers and their units stay on one line."""
    return re.sub(rf"(?<=\d) (?=(?:%|[MG]B|samples/s|min|s|h|M)(?:\W|$))|(?<=top{HYPHEN}\d) ", "&nbsp;", html)


STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: .8rem 1.6rem; }
.k { display: inline-block; width: 1.6em; margin-right: .35em; vertical-align: middle; border-top: 2px solid; }
.k.dash { border-top-style: dashed; }
.summary td, .summary th { min-width: 8.5rem; vertical-align: top; overflow-wrap: anywhere; }
.summary td:first-child { min-width: 0; white-space: nowrap; opacity: .75; }
.state { font-weight: 600; } .running::before { content: "▶ "; } .complete::before { content: "✓ "; }
.stopped::before { content: "■ "; } .failed::before { content: "✗ "; }
"""
"""Rules of style of reports, besides those of all pages."""
