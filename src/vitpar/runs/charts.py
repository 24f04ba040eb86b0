"""Charts of a report over steps: the metrics that are drawn, thinned and smoothed for the page's script, and marks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpar.runs.folder import RunRecord, seed_groups
from vitpar.runs.metrics import Column
from vitpar.runs.pages.figures import SERIES, series_colour
from vitpar.runs.pages.plotly import Charts, Figure, Key
from vitpar.text import count, shown

AXES = ("step", "samples", "hours")
"""Horizontal axes."""
SMOOTHING = {"off": 0.0, "light": 0.03, "strong": 0.12}
"""Width of the window of smoothing, as a fraction of all rows, by the name of its button."""
SAME = 0.01
"""Largest difference of lines that coincide, as a fraction of their range. They are drawn with different widths."""
LOG_SPAN = 50.0
"""Ratio of the largest to the usual smallest value above which a chart may have a logarithmic axis."""
KEY_POINTS = ("first", "lowest", "highest", "last", "missing")
"""Points of a line in the table below its chart, and the number of rows without a value."""
GAP = 5.0
"""Distance of two rows, in medians of the distances, above which a line is interrupted."""
DIGITS = 6
"""Significant digits of numbers in the page."""
COLUMNS = 400
"""Parts of a long line that keep their smallest and largest value, divided by the number of runs."""
MANY_RUNS = 3
"""Number of runs above which charts are higher."""
MOST_MARKS = 60
"""Maximum number of marks of a kind and run in a chart: more could not be distinguished."""


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    run: int
    """Number of the run, which determines the colour."""
    name: str
    """Name in texts, such as `run 1, validation`."""
    x: Mapping[str, Column]
    """Position of every row on each of `AXES`, and possibly other columns."""
    y: Column
    """Values; those that are not finite interrupt the line."""
    evaluated: bool = False
    """Whether it is of evaluations: dashed, with a dot at every point."""
    group: int | None = None
    """Number of the group of layers, which determines the colour, and has a button; None for a line of the model."""


@dataclass(frozen=True)
class Chart:
    """A chart of several lines."""

    title: str
    """Title."""
    lines: Sequence[Line]
    """Lines, of which at least one has a finite value."""
    digits: str = ".3g"
    """Format of values in texts, as Python and d3 read it."""
    unit: str = ""
    """Unit after values, with a space before it."""
    scale: float = 1.0
    """Factor from values to the unit."""
    smooth: bool = True
    """Whether lines of training are smoothed."""
    zero: bool = False
    """Whether the vertical axis starts at 0."""
    log: bool = False
    """Whether the vertical axis is logarithmic if values span a large range."""
    share: bool = False
    """Whether values are shares, from 0 to 1: the axis ends at 1 at most."""
    whole: bool = False
    """Whether values are counts."""
    note: str = ""
    """Sentence below the chart."""

    @property
    def groups(self) -> list[list[Line]]:
        """Lines of training, and those of evaluations, where there are any."""
        both = ([line for line in self.lines if line.evaluated == evaluated] for evaluated in (False, True))
        return [lines for lines in both if lines]


def figure(chart: Chart, columns: int, height: int = 240) -> Figure:
    """Return a chart for a page.

    columns: parts of the axis of which a long line keeps the smallest and the largest value.
    """
    differences = [difference(lines) for lines in chart.groups]
    same = ""
    if None not in differences:
        apart = max(filter(None, differences), default=0.0)
        by = f"coincide: they differ by at most {apart * chart.scale:.2g}{chart.unit}" if apart else "are equal"
        same = f"The lines of the runs {by}."
    rows = []
    for line in chart.lines:
        fine = np.flatnonzero(np.isfinite(line.y))
        y = line.y[fine]
        indices = fine[[0, int(y.argmin()), int(y.argmax()), -1]].tolist() if len(fine) else []
        said = [
            f"{line.y[index] * chart.scale:{chart.digits}}{chart.unit} at step {line.x['step'][index]:,.0f}"
            for index in indices
        ]
        rows.append([line.name, *(said or [""] * 4), str(len(line.y) - len(fine))])
    keys = [Key(line.name, series_colour(line.group)) for line in chart.lines if line.group is not None]
    data = data_of(chart, columns)
    return Figure(chart.title, data, ["line", *KEY_POINTS], rows, (chart.note, same), keys, height)


def data_of(chart: Chart, columns: int) -> dict[str, Any]:
    """Return what the page's script draws of a chart, as JSON. columns: as for `figure`."""
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in chart.lines])
    positive = bool((values > 0).all())
    return {
        "digits": chart.digits.replace("g", "~g"),
        "unit": chart.unit,
        "zero": chart.zero,
        "most": chart.scale if chart.share else None,
        "least": 0.01 * chart.scale if chart.share else None,
        "whole": chart.whole,
        "positive": positive,
        "log": chart.log and positive and float(values.max()) > LOG_SPAN * float(np.quantile(values, 0.05)),
        "lines": list(_lines(chart, columns)),
    }


def _lines(chart: Chart, columns: int) -> Iterator[dict[str, Any]]:
    """Yield the data of the lines of a chart. null interrupts a line."""
    shared = [shared_steps([(line.x["step"], line.y) for line in lines], columns) for lines in chart.groups]
    # Training rows at evaluated steps are kept, so that both values are shown together.
    shared[0] = np.unique(np.concatenate(shared))
    for lines, steps in zip(chart.groups, shared, strict=True):
        same = difference(lines) is not None
        for above, line in zip(reversed(range(len(lines))), lines, strict=True):
            rows, breaks = drawn_rows(line.x["step"], line.y, steps, columns)
            values = partial(_values, rows=rows, breaks=breaks)
            windows = {} if line.evaluated or not chart.smooth else SMOOTHING
            yield {
                "run": line.run,
                "colour": None if line.group is None else SERIES[line.group % len(SERIES)],
                "name": line.name,
                "evaluated": line.evaluated,
                # Of lines that coincide the first is drawn first, and broadest.
                "wider": above if same else 0,
                "x": {axis: values(line.x[axis]) for axis in AXES},
                "y": values(line.y * chart.scale),
                "smooth": {name: values(smoothed(line.y, n) * chart.scale) for name, n in windows.items() if n},
            }


def _values(column: Column, rows: NDArray[np.int64], breaks: NDArray[np.int64]) -> list[float | None]:
    return numbers(np.insert(column[rows], breaks, np.nan))


def numbers(column: Column) -> list[float | None]:
    """Return numbers for JSON, with `DIGITS` digits; integers are exact, and None stands for what is not finite."""
    return [
        None if not np.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
        for value in column.tolist()
    ]


def difference(lines: Sequence[Line]) -> float | None:
    """Return the largest difference of lines that coincide; None for those that do not, and for a line alone."""
    first = lines[0]
    if len(lines) < 2 or any(not np.array_equal(first.x["step"], line.x["step"]) for line in lines):
        return None
    values = np.stack([line.y for line in lines])
    fine = np.isfinite(values)
    if not fine.any() or (fine != fine[0]).any():
        return None
    values = values[:, fine[0]]
    apart = float(np.ptp(values, axis=0).max())
    return apart if apart <= SAME * float(np.ptp(values)) else None


def shared_steps(series: Sequence[tuple[Column, Column]], columns: int) -> Column:
    """Return the steps at which the lines of a chart keep their rows.

    These are all steps, or for long lines those of the smallest and the largest value of each line in each of `columns`
    parts of the axis. So every spike stays visible, and lines keep the same steps: their values can be compared.

    series: (steps, values) of each line. The steps of a line ascend.
    """
    steps = np.concatenate([np.empty(0), *(step for step, _ in series)])
    if max((len(step) for step, _ in series), default=0) <= 2 * columns:
        return np.unique(steps)
    edges = np.linspace(steps.min(), steps.max(), columns + 1)[1:-1]
    kept = []
    for step, y in series:
        fine = np.isfinite(y)
        part = np.searchsorted(edges, step[fine], side="right")
        ends = (np.diff(part, prepend=-1) > 0) | (np.diff(part, append=columns) > 0)
        # Sorted by part, then value: the first of a part is the smallest, its last the largest.
        kept += [step[fine][np.lexsort((y[fine], part))][ends], step[:1], step[-1:]]
    return np.unique(np.concatenate(kept))


def drawn_rows(step: Column, y: Column, shared: Column, columns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the rows of a line that are drawn, and the places in them where the line is interrupted.

    It is interrupted where values are missing or not finite, and by gaps in the steps; in a thinned line only where
    that can be seen.

    shared: result of `shared_steps`.
    """
    fine = np.flatnonzero(np.isfinite(y))
    rows = fine[np.isin(step[fine], shared)]
    if len(rows) < len(fine):
        broken = np.diff(step[rows]) > 2 * (shared[-1] - shared[0]) / columns
    else:
        usual = float(np.median(np.diff(step))) if len(step) > 1 else np.inf
        broken = (np.diff(rows) > 1) | (np.diff(step[rows]) > GAP * usual)
    return rows, np.flatnonzero(broken) + 1


def smoothed(y: Column, share: float) -> Column:
    """Return the mean of the finite values in a centred window; NaN where the value itself is not finite.

    share: width of the window, as a fraction of all rows.
    """
    fine, half = np.isfinite(y), max(1, round(share * len(y))) // 2
    index = np.arange(len(y))
    left, right = np.maximum(index - half, 0), np.minimum(index + half + 1, len(y))
    sums = np.append(0.0, np.cumsum(np.where(fine, y, 0.0)))
    counts = np.append(0, np.cumsum(fine))
    with np.errstate(invalid="ignore"):
        return np.where(fine, (sums[right] - sums[left]) / (counts[right] - counts[left]), np.nan)


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
