"""Charts of series over steps: the data that the page's script draws, a description, and a table of key points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from vitpar.pages.document import table
from vitpar.pages.figures import SERIES, series_colour
from vitpar.pages.plotly import Figure, Key
from vitpar.runs.metrics import Column
from vitpar.runs.sampling import drawn_rows, shared_steps, smoothed

AXES = ("step", "samples", "hours")
"""Horizontal axes."""
SMOOTHING = {"off": 0.0, "light": 0.03, "strong": 0.12}
"""Width of the window of smoothing, as a fraction of all rows, by the name of its button."""
SAME = 0.01
"""Largest difference of lines that coincide, as a fraction of their range. They are drawn with different widths."""
LOG_SPAN = 50.0
"""Ratio of the largest to the usual smallest value above which a chart may have a logarithmic axis."""
KEY_POINTS = ("first", "lowest", "highest", "last")
"""Points of a line that its description and the table name."""
DIGITS = 6
"""Significant digits of numbers in the page."""


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    run: int
    """Number of the run, which determines the colour."""
    name: str
    """Name in texts, such as `run 1, validation`."""
    x: Mapping[str, Column]
    """Position of every row on each of `AXES`."""
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
    note: str = field(default="")
    """Sentence below the chart."""

    def words(self, value: float) -> str:
        """Return a value with its unit."""
        return f"{value * self.scale:{self.digits}}{self.unit}"


def figure(chart: Chart, columns: int, height: int = 240) -> Figure:
    """Return a chart for a page, with its description, notes and a table of key points.

    columns: as for `data_of`.
    """
    _, difference = coinciding(chart.lines)
    same = "" if difference is None else "The lines of the runs are equal."
    if difference:
        apart = f"{difference * chart.scale:.2g}{chart.unit}"
        same = f"The lines of the runs coincide: they differ by at most {apart}."
    points = {line.name: _key_points(chart, line) for line in chart.lines}
    said = (
        f"{name}: {', '.join(f'{what} {value}' for what, value in zip(KEY_POINTS, values, strict=True))}."
        if values
        else f"{name}: no finite value."
        for name, values in points.items()
    )
    words = " ".join(filter(None, (f"{chart.title}.", *said, same)))
    missing = (str(int((~np.isfinite(line.y)).sum())) for line in chart.lines)
    rows = [
        [escape(text) for text in (name, *(values or ["–"] * len(KEY_POINTS)), lost)]
        for (name, values), lost in zip(points.items(), missing, strict=True)
    ]
    key_points = table(("line", *KEY_POINTS, "missing"), rows, slice(0, 0))
    keys = [Key(line.name, series_colour(line.group)) for line in chart.lines if line.group is not None]
    return Figure(chart.title, words, data_of(chart, columns), (chart.note, same), keys, key_points, height)


def _key_points(chart: Chart, line: Line) -> list[str]:
    """Return the values of `KEY_POINTS` with their steps; nothing if no value is finite."""
    fine = np.flatnonzero(np.isfinite(line.y))
    if not len(fine):
        return []
    y = line.y[fine]
    indices = fine[[0, int(y.argmin()), int(y.argmax()), -1]].tolist()
    return [f"{chart.words(float(line.y[index]))} at step {line.x['step'][index]:,.0f}" for index in indices]


def data_of(chart: Chart, columns: int) -> dict[str, Any]:
    """Return what the page's script draws of a chart, as JSON.

    columns: parts of the axis of which a long line keeps the smallest and the largest value.
    """
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in chart.lines])
    positive = bool((values > 0).all())
    widths, _ = coinciding(chart.lines)
    shared = {
        evaluated: shared_steps(
            [(line.x["step"], line.y) for line in chart.lines if line.evaluated == evaluated], columns
        )
        for evaluated in (False, True)
    }
    # Training rows at evaluated steps are kept, so that both values are shown together.
    shared[False] = np.union1d(shared[False], shared[True])
    return {
        "digits": chart.digits.replace("g", "~g"),
        "unit": chart.unit,
        "zero": chart.zero,
        "most": chart.scale if chart.share else None,
        "least": 0.01 * chart.scale if chart.share else None,
        "whole": chart.whole,
        "positive": positive,
        "log": chart.log and positive and float(values.max()) > LOG_SPAN * float(np.quantile(values, 0.05)),
        "lines": [
            _line(chart, line, widths.get(number, 0), shared[line.evaluated], columns)
            for number, line in enumerate(chart.lines)
        ],
    }


def _line(chart: Chart, line: Line, wider: int, shared: Column, columns: int) -> dict[str, Any]:
    """Return the data of a line. A missing value interrupts it."""
    rows, breaks = drawn_rows(line.x["step"], line.y, shared, columns)
    places = np.flatnonzero(breaks)
    smooth = {} if line.evaluated or not chart.smooth else {name: share for name, share in SMOOTHING.items() if share}

    def values(column: Column, inserted: Column | float = np.nan) -> list[float | None]:
        return numbers(np.insert(column[rows], places, inserted))

    return {
        "run": line.run,
        "colour": None if line.group is None else SERIES[line.group % len(SERIES)],
        "name": line.name,
        "evaluated": line.evaluated,
        "wider": wider,
        "x": {axis: values(line.x[axis], line.x[axis][rows][places - 1]) for axis in AXES},
        "y": values(line.y * chart.scale),
        "smooth": {name: values(smoothed(line.y, share) * chart.scale) for name, share in smooth.items()},
    }


def numbers(column: Column) -> list[float | None]:
    """Return numbers for JSON, with `DIGITS` digits; integers are exact, and None stands for what is not finite."""
    return [
        None if not np.isfinite(value) else int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
        for value in column.tolist()
    ]


def coinciding(lines: Sequence[Line]) -> tuple[dict[int, int], float | None]:
    """Return how many lines are drawn over each of those that coincide, by its index: it is that much wider.

    Also returns the largest difference between the lines, if all coincide with those of the same kind; else None.
    """
    widths: dict[int, int] = {}
    differences = []
    for evaluated in (False, True):
        group = [index for index, line in enumerate(lines) if line.evaluated == evaluated]
        if not group:
            continue
        apart = _difference([lines[index] for index in group])
        differences.append(apart)
        if apart is not None:
            widths |= {index: len(group) - 1 - turn for turn, index in enumerate(group)}
    known = [apart for apart in differences if apart is not None]
    return widths, max(known) if len(known) == len(differences) else None


def _difference(lines: Sequence[Line]) -> float | None:
    """Return the largest difference of several lines; None for lines that do not coincide, and for a line alone."""
    first = lines[0]
    if len(lines) < 2 or any(not np.array_equal(first.x["step"], line.x["step"]) for line in lines):
        return None
    values = np.stack([line.y for line in lines])
    fine = np.isfinite(values)
    if not fine.any() or (fine != fine[0]).any():
        return None
    values = values[:, fine[0]]
    apart = float((values.max(axis=0) - values.min(axis=0)).max())
    return apart if apart <= SAME * float(values.max() - values.min()) else None
