"""Charts of a report: which metrics are drawn, and the events that are marked in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from vitpar.runs.chart import AXES, Chart, Line, figure, numbers
from vitpar.runs.folder import RunRecord, seed_groups
from vitpar.runs.metrics import Column
from vitpar.runs.pages.figures import SERIES
from vitpar.runs.pages.plotly import Charts
from vitpar.text import count, shown

COLUMNS = 400
"""Parts of a long line that keep their smallest and largest value, divided by the number of runs."""
MANY_RUNS = 3
"""Number of runs above which charts are higher."""
MOST_MARKS = 60
"""Maximum number of marks of a kind and run in a chart: more could not be distinguished."""


def charts(runs: Sequence[RunRecord]) -> tuple[Charts, list[str]]:
    """Return the charts for which a run has values: for the page's script, and their HTML."""
    columns, height = COLUMNS // len(runs), 320 if len(runs) > MANY_RUNS else 240
    marks = [mark for number, run in enumerate(runs) for mark in marks_of(run, number)]
    page = Charts(colours=SERIES[: len(runs)], marks=marks, seeds=seed_groups(runs))
    return page, [page.add(figure(chart, columns, height)) for chart in _all(runs) if chart.lines]


def _all(runs: Sequence[RunRecord]) -> list[Chart]:
    def lines(columns: Iterable[Column | None], evaluated: bool = False) -> list[Line]:
        """Return a line for the column of each run that has a finite value."""
        found = []
        for number, (run, column) in enumerate(zip(runs, columns, strict=True)):
            if column is not None and np.isfinite(column).any():
                words = [f"run {number + 1}"] * (len(runs) > 1) + ["validation"] * evaluated
                x = run.metrics.eval if evaluated else run.metrics.train
                found.append(Line(number, ", ".join(words) or "training", x, column, evaluated))
        return found

    def train(name: str) -> list[Line]:
        return lines(run.metrics.train.get(name) for run in runs)

    def both(name: str) -> list[Line]:
        return train(name) + lines((run.metrics.eval.get(name) for run in runs), evaluated=True)

    def share(title: str, drawn: Sequence[Line], note: str = "") -> Chart:
        return Chart(title, drawn, ",.1f", " %", 100.0, zero=True, share=True, note=note)

    losses, rates, memory = both("loss"), train("images_per_second"), train("memory_bytes")
    metrics = {metric.name: metric for run in runs for metric in run.task_metrics}.values()
    unit, scale, digits = ("GB", 1e-9, ",.3g") if _most(memory) >= 1e9 else ("MB", 1e-6, ",.0f")
    waits = "Share of a step's time that the rank which waits longest waits for its images."
    return [
        Chart("Loss", losses, ",.4f" if _most(losses) < 1e6 else ".4g", log=True),
        *((share if one.share else Chart)(one.words[:1].upper() + one.words[1:], both(one.name)) for one in metrics),
        Chart("Learning rate", train("lr"), smooth=False, zero=True),
        Chart("Weight decay", train("weight_decay"), smooth=False, zero=True),
        Chart("Drop-path", train("drop_path"), smooth=False, zero=True),
        Chart("Image size", train("image_size"), ",.0f", " px", smooth=False, whole=True),
        Chart("Gradient norm, before clipping", train("grad_norm"), log=True),
        *(_group_charts(runs[0]) if len(runs) == 1 else ()),
        Chart("Loss scale", train("loss_scale"), ",.6g", smooth=False, log=True),
        Chart("Samples/s", rates, ",.0f" if _most(rates) >= 100 else ",.1f", zero=True),
        share("Model FLOPs utilisation (MFU)", train("mfu")),
        share("Time waiting for data", lines(map(waiting_share, runs)), waits),
        share("Utilisation of GPUs", train("gpu_utilization")),
        Chart("Power of all GPUs", train("gpu_watts"), ",.0f", " W", zero=True),
        Chart(f"Peak memory of rank 0, {unit}", memory, digits, f" {unit}", scale, smooth=False, zero=True),
    ]


def _group_charts(run: RunRecord) -> Iterator[Chart]:
    """Yield the charts of groups of layers. Those of several runs would have too many lines."""
    titles = {
        "grad_norms": ("Gradient norm by layers, before clipping", ""),
        "update_ratios": ("Update relative to the weights, by layers", "About 0.001 is usual."),
    }
    for key, (title, note) in titles.items():
        columns = {name: column for name, column in run.metrics.train.items() if name.startswith(f"{key}/")}
        lines = []
        for number, (name, column) in enumerate(columns.items()):
            fine = np.isfinite(column)  # rows between those with groups are no gaps
            x = {axis: run.metrics.train[axis][fine] for axis in AXES}
            lines += [Line(0, name.removeprefix(f"{key}/"), x, column[fine], group=number)] if fine.any() else []
        yield Chart(title, lines, smooth=False, log=True, note=note)


def _most(lines: Sequence[Line]) -> float:
    """Return the largest finite absolute value of lines; 0 if there is none."""
    return max((float(np.abs(line.y[np.isfinite(line.y)]).max()) for line in lines), default=0.0)


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
    marks = [("checkpoint", step, f"checkpoint after step {step:,}") for step in run.events.saves]
    plans = [shown(start.plan) for start in run.events.starts]
    for before, plan, start in zip(["", *plans], plans, run.events.starts, strict=False):
        if start.step:
            under = f" under {plan}" + (f" instead of {before}" if before not in ("", plan) else "")
            marks.append(("restart", start.step, f"resumed after {count(start.step, 'step')}{under}"))
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
