"""Charts of a report: which metrics are drawn, and the events that are marked in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vitpar.pages.figures import SERIES
from vitpar.pages.plotly import Charts
from vitpar.runs.chart import AXES, Chart, Line, figure, numbers
from vitpar.runs.folder import RunRecord
from vitpar.runs.metrics import Column
from vitpar.tasks import Metric
from vitpar.text import count, shown

COLUMNS, MANY_RUNS = 400, 3
"""Parts of a long line that keep their smallest and largest value, and number of runs above which they are half."""
MOST_MARKS = 60
"""Maximum number of marks of a kind and run in a chart: more could not be distinguished."""


def charts(runs: Sequence[RunRecord]) -> tuple[Charts, list[str]]:
    """Return the charts for which a run has values: for the page's script, and their HTML."""
    drawn = [chart for chart in _all(runs) if any(np.isfinite(line.y).any() for line in chart.lines)]
    many = len(runs) > MANY_RUNS
    marks = [mark for number, run in enumerate(runs) for mark in marks_of(run, number)]
    page = Charts(colours=SERIES[: len(runs)], marks=marks)
    return page, [page.add(figure(chart, COLUMNS // 2 if many else COLUMNS, 320 if many else 240)) for chart in drawn]


def _all(runs: Sequence[RunRecord]) -> list[Chart]:
    def train(name: str) -> list[Line]:
        return [_train_line(runs, number, run.metrics.train[name]) for number, run in enumerate(runs)]

    def share(title: str, lines: Sequence[Line], note: str = "") -> Chart:
        return Chart(title, lines, ",.1f", " %", 100.0, zero=True, share=True, note=note)

    losses = [*train("loss"), *_eval_lines(runs, "loss", "validation")]
    waits = [_train_line(runs, number, waiting_share(run)) for number, run in enumerate(runs)]
    about = "Share of a step's time that the rank which waits longest waits for its images."
    rates = train("images_per_second")
    return [
        Chart("Loss", losses, ",.4f" if _most(losses) < 1e6 else ".4g", log=True),
        *(
            share(_titled(metric), lines) if metric.share else Chart(_titled(metric), lines)
            for metric, lines in _metric_lines(runs)
        ),
        Chart("Learning rate", train("lr"), smooth=False, zero=True),
        Chart("Weight decay", train("weight_decay"), smooth=False, zero=True),
        Chart("Drop-path", train("drop_path"), smooth=False, zero=True),
        Chart("Image size", train("image_size"), ",.0f", " px", smooth=False, whole=True),
        Chart("Gradient norm, before clipping", train("grad_norm"), log=True),
        *_group_charts(runs),
        Chart("Loss scale", train("loss_scale"), ",.6g", smooth=False, log=True),
        Chart("Samples/s", rates, ",.0f" if _most(rates) >= 100 else ",.1f", zero=True),
        share("Model FLOPs utilisation (MFU)", train("mfu")),
        share("Time waiting for data", waits, about),
        share("Utilisation of GPUs", train("gpu_utilization")),
        Chart("Power of all GPUs", train("gpu_watts"), ",.0f", " W", zero=True),
        _memory(train("memory_bytes")),
    ]


def _group_charts(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    """Yield the charts of groups of layers. Those of several runs would have too many lines."""
    titles = {
        "grad_norms": ("Gradient norm by layers, before clipping", ""),
        "update_ratios": ("Update relative to the weights, by layers", "About 0.001 is usual."),
    }
    for key, (title, note) in titles.items() if len(runs) == 1 else ():
        train = runs[0].metrics.train
        columns = {name.removeprefix(f"{key}/"): column for name, column in train.items() if name.startswith(f"{key}/")}
        lines = []
        for number, (name, column) in enumerate(columns.items()):
            fine = np.isfinite(column)
            lines.append(Line(0, name, {axis: train[axis][fine] for axis in AXES}, column[fine], group=number))
        if any(len(line.y) for line in lines):
            yield Chart(title, [line for line in lines if len(line.y)], smooth=False, log=True, note=note)


def _most(lines: Sequence[Line]) -> float:
    """Return the largest finite absolute value of lines; 0 if there is none."""
    return max((float(np.abs(line.y[np.isfinite(line.y)]).max(initial=0.0)) for line in lines), default=0.0)


def _name(runs: Sequence[RunRecord], number: int) -> str:
    """Return the name of a run in texts of charts; empty for the only one."""
    return f"run {number + 1}" if len(runs) > 1 else ""


def _train_line(runs: Sequence[RunRecord], number: int, values: Column) -> Line:
    x = {axis: runs[number].metrics.train[axis] for axis in AXES}
    return Line(number, _name(runs, number) or "training", x, values)


def _eval_lines(runs: Sequence[RunRecord], name: str, what: str = "") -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        if not np.isfinite(run.metrics.eval.get(name, np.empty(0))).any():
            continue
        words = ", ".join(filter(None, (_name(runs, number), what))) or "validation"
        x = {axis: run.metrics.eval[axis] for axis in AXES}
        lines.append(Line(number, words, x, run.metrics.eval[name], evaluated=True))
    return lines


def _metric_lines(runs: Sequence[RunRecord]) -> Iterator[tuple[Metric, list[Line]]]:
    """Yield the metrics of the runs' tasks, each with its lines."""
    metrics = {metric.name: metric for run in runs for metric in run.task_metrics}
    for name, metric in metrics.items():
        having = [number for number, run in enumerate(runs) if name in run.metrics.eval]  # the same task
        trained = [_train_line(runs, number, runs[number].metrics.train[name]) for number in having]
        evaluated = [line for line in _eval_lines(runs, name, "validation") if line.run in having]
        yield metric, [line for line in trained if np.isfinite(line.y).any()] + evaluated


def _titled(metric: Metric) -> str:
    return f"{metric.words[:1].upper()}{metric.words[1:]}"


def waiting_share(run: RunRecord) -> Column:
    """Return the share of time that was spent waiting for data, for every row.

    The time of a step is the mean over its log interval, so waits are averaged over the same rows.
    """
    step_ms, data_ms = run.metrics.train["step_ms"], run.metrics.train["data_ms"]
    if not len(step_ms):
        return step_ms
    first = np.flatnonzero(np.append(True, step_ms[1:] != step_ms[:-1]))
    lengths = np.diff(np.append(first, len(step_ms)))
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.add.reduceat(data_ms, first) / lengths / step_ms[first]
    return np.repeat(np.clip(share, 0.0, 1.0), lengths)


def marks_of(run: RunRecord, number: int) -> list[dict[str, Any]]:
    """Return the checkpoints and restarts of a run that can be distinguished, for the page's script."""
    marks = [("checkpoint", step, f"checkpoint after step {step:,}") for step in run.log.saves]
    plans = [shown(start.plan) for start in run.log.starts]
    for before, plan, start in zip(["", *plans], plans, run.log.starts, strict=False):
        if start.after:
            under = f" under {plan}" + (f" instead of {before}" if before not in ("", plan) else "")
            marks.append(("restart", start.after, f"resumed after {count(start.after, 'step')}{under}"))
    apart = max((step for _, step, _ in marks), default=0) / MOST_MARKS
    kept, last = [], dict[str, float]()
    for kind, step, words in sorted(marks, key=lambda mark: mark[1]):
        if step - last.get(kind, -np.inf) >= apart:
            last[kind] = step
            kept.append((kind, step, words))
    steps = np.array([step for _, step, _ in kept], dtype=np.float64)
    places = {axis: numbers(run.metrics.at(axis, steps)) for axis in AXES}
    return [
        {"run": number, "kind": kind, "words": words, "x": {axis: places[axis][index] for axis in AXES}}
        for index, (kind, _, words) in enumerate(kept)
    ]


def percent(share: float) -> str:
    """Return a share as a percentage: 0.912 becomes `91.2 %`."""
    return f"{share * 100:.1f} %"


def _memory(lines: Sequence[Line]) -> Chart:
    """Return the chart of memory, in GB or MB."""
    unit, scale, digits = ("GB", 1e-9, ",.3g") if _most(lines) >= 1e9 else ("MB", 1e-6, ",.0f")
    return Chart(f"Peak memory of rank 0, {unit}", lines, digits, f" {unit}", scale, smooth=False, zero=True)
