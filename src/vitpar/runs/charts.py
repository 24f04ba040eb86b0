"""Charts of a report: which metrics are drawn, and the events that are marked in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vitpar.runs.axes import compact
from vitpar.runs.chart import AXES, COLUMNS, Line, LineChart, RunMark, draw
from vitpar.runs.folder import RunRecord
from vitpar.runs.metrics import Column
from vitpar.tasks import Metric
from vitpar.text import count, size

MANY_RUNS = 3
"""Number of runs above which lines have fewer points, so that the page stays small."""


def charts(runs: Sequence[RunRecord]) -> list[str]:
    """Return the HTML of the charts for which a run has values."""
    marks = [mark for number, run in enumerate(runs) for mark in marks_of(run, number)]
    columns = COLUMNS if len(runs) <= MANY_RUNS else COLUMNS // 2
    return [draw(chart, columns) for chart in _all(runs, marks) if _has_values(chart)]


def _all(runs: Sequence[RunRecord], marks: Sequence[RunMark]) -> list[LineChart]:
    def train(name: str) -> list[Line]:
        return [_train_line(runs, number, run.metrics.train[name]) for number, run in enumerate(runs)]

    def share(title: str, lines: Sequence[Line], note: str = "") -> LineChart:
        return LineChart(
            title,
            lines,
            percent,
            percent_tick,
            zero=True,
            share=True,
            note=note,
            difference=lambda value: f"{value * 100:.2g} %",
            marks=marks,
        )

    losses = [*train("loss"), *_eval_lines(runs, "loss", "validation")]
    waits = [_train_line(runs, number, waiting_share(run)) for number, run in enumerate(runs)]
    about = "Share of a step's time that the rank which waits longest waits for its images."
    return [
        LineChart("Loss", losses, _loss, compact, log=True, marks=marks),
        *(
            share(_titled(metric), lines)
            if metric.share
            else LineChart(_titled(metric), lines, _short, compact, marks=marks)
            for metric, lines in _metric_lines(runs)
        ),
        LineChart("Learning rate", train("lr"), _short, _short, smooth=False, zero=True, marks=marks),
        LineChart("Gradient norm, before clipping", train("grad_norm"), _short, compact, log=True, marks=marks),
        LineChart("Loss scale", train("loss_scale"), compact, compact, smooth=False, log=True, marks=marks),
        LineChart("Samples/s", train("images_per_second"), _rate, compact, zero=True, marks=marks),
        share("Model FLOPs utilisation (MFU)", train("mfu")),
        share("Time waiting for data", waits, about),
        _memory(train("memory_bytes"), marks),
    ]


def _has_values(chart: LineChart) -> bool:
    return any(np.isfinite(line.y).any() for line in chart.lines)


def _name(runs: Sequence[RunRecord], number: int) -> str:
    """Return the name of a run in texts of charts; empty for the only one."""
    return f"run {number + 1}" if len(runs) > 1 else ""


def _train_line(runs: Sequence[RunRecord], number: int, values: Column) -> Line:
    x = {axis: runs[number].metrics.train[axis] for axis in AXES}
    return Line(number, _name(runs, number) or "training", x, values)


def _eval_lines(runs: Sequence[RunRecord], name: str, what: str = "") -> list[Line]:
    lines = []
    for number, run in enumerate(runs):
        if name not in run.metrics.eval:
            continue
        words = ", ".join(filter(None, (_name(runs, number), what))) or "validation"
        lines.append(
            Line(number, words, {axis: run.metrics.eval[axis] for axis in AXES}, run.metrics.eval[name], dashed=True)
        )
    return lines


def _metric_lines(runs: Sequence[RunRecord]) -> Iterator[tuple[Metric, list[Line]]]:
    """Yield the metrics of the runs' tasks, each with its lines."""
    metrics = {metric.name: metric for run in runs for metric in run.task_metrics}
    for name, metric in metrics.items():
        having = [number for number, run in enumerate(runs) if name in run.metrics.eval]
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


def marks_of(run: RunRecord, number: int) -> list[RunMark]:
    """Return the checkpoints and restarts of a run."""
    marks = [("saved", step, f"checkpoint after step {step:,}") for step in run.log.saves]
    plans = [start.plan for start in run.log.starts]
    for before, start in zip(["", *plans], run.log.starts, strict=False):
        if start.after:
            under = f" under {start.plan}" + (f" instead of {before}" if before not in ("", start.plan) else "")
            marks.append(("restart", start.after, f"resumed after {count(start.after, 'step')}{under}"))
    steps = np.array([step for _, step, _ in marks], dtype=np.float64)
    places = {axis: run.metrics.at(axis, steps) for axis in AXES}
    return [
        RunMark(number, kind, {axis: float(places[axis][index]) for axis in AXES}, words)
        for index, (kind, _, words) in enumerate(marks)
    ]


def percent(share: float) -> str:
    """Return a share as a percentage: 0.912 becomes `91.2 %`."""
    return f"{share * 100:.1f} %"


def percent_tick(share: float) -> str:
    """Return a share as a percentage with few digits: 0.2 becomes `20 %`."""
    return f"{share * 100:.3g} %"


def _loss(value: float) -> str:
    return f"{value:,.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _rate(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f} samples/s"


def _memory(lines: Sequence[Line], marks: Sequence[RunMark]) -> LineChart:
    """Return the chart of memory, in GB or MB."""
    most = max((float(np.nanmax(line.y)) for line in lines if np.isfinite(line.y).any()), default=0.0)
    unit, scale = ("GB", 1e9) if most >= 1e9 else ("MB", 1e6)
    title = f"Peak memory of rank 0, {unit}"
    return LineChart(title, lines, size, lambda value: compact(value / scale), smooth=False, zero=True, marks=marks)
