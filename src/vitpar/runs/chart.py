"""Charts of series over steps, samples and hours, as SVG. Rules of style choose the axis and the smoothing.

A chart contains a drawing for each axis, so a page needs no script to switch between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from vitpar.runs.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, HorizontalAxis, VerticalAxis, Words
from vitpar.runs.metrics import Column
from vitpar.runs.sampling import Points, envelope, smoothed

AXES = {"step": "step", "samples": "samples", "hours": "hours of training"}
"""Horizontal axes, and their names in a chart."""
SMOOTHING = {"off": 0.0, "light": 0.03, "strong": 0.12}
"""Width of the window of smoothing, as a fraction of all rows, by the name of its button."""
USUAL_SMOOTHING = "light"
"""Smoothing that is chosen at first."""
COLOURS = (
    ("#2f5bd0", "#5b8cff"),
    ("#c44e00", "#ff7d33"),
    ("#009a70", "#2fd6a3"),
    ("#8f2a7a", "#f0a3cf"),
    ("#000000", "#ffffff"),
    ("#3f9ad6", "#9adcff"),
)
"""Colours of runs in the light and the dark theme, distinct with red-green colour blindness too (a test simulates it).

They have no other meaning in charts (``vitpar.pages.svg.COLOURS``).
"""
COLUMNS = WIDTH - LEFT - RIGHT
"""Pixel columns of a chart of few runs."""
SAME = 0.01
"""Largest difference of lines that coincide, as a fraction of their range. They are drawn in turns, dash by dash."""
DASH = 7
"""Length of such a dash, in units of the view box."""


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    run: int
    """Number of the run, which determines the colour."""
    name: str
    """Name in texts, such as `run 1, validation`."""
    x: Mapping[str, Column]
    """Position of every point on each of `AXES`."""
    y: Column
    """Values; those that are not finite interrupt the line."""
    dashed: bool = False
    """Whether it is dashed, with a dot at every point."""


@dataclass(frozen=True)
class RunMark:
    """An event of a run, marked in its charts."""

    run: int
    """Number of the run."""
    kind: str
    """Kind of the event, a key of `MARKS`."""
    x: Mapping[str, float]
    """Position on each of `AXES`."""
    words: str
    """Description."""


MARKS = {"saved": "▲", "restart": "↻"}
"""Symbols of marked events."""


@dataclass(frozen=True)
class LineChart:
    """A chart of several lines."""

    title: str
    """Title."""
    lines: Sequence[Line]
    """Lines, of which at least one has a finite value."""
    words: Words
    """Formats a value with its unit, for texts."""
    tick: Words
    """Formats a value at the vertical axis."""
    smooth: bool = True
    """Whether lines without dots are smoothed."""
    zero: bool = False
    """Whether the vertical axis starts at 0."""
    log: bool = False
    """Whether the vertical axis is logarithmic if values span a large range."""
    share: bool = False
    """Whether values are shares, from 0 to 1."""
    note: str = ""
    """Sentence below the chart."""
    difference: Words = "{:.2g}".format
    """Formats a small difference of two values."""
    marks: Sequence[RunMark] = field(default=())
    """Events of the runs."""


def draw(chart: LineChart, columns: int = COLUMNS) -> str:
    """Return the chart as HTML: title, drawing, and a table of key points.

    columns: pixel columns; fewer make a smaller page.
    """
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in chart.lines])
    vertical = VerticalAxis(values, chart.tick, zero=chart.zero, log=chart.log, share=chart.share)
    dashes, difference = _turns(chart.lines)
    drawn: dict[str, list[str]] = {}
    for axis in AXES:
        for body in _drawings(
            chart, axis, vertical, columns, dashes
        ):  # lines over steps and samples are often the same
            drawn.setdefault(body, []).append(f"ax-{axis}")
    groups = "".join(f'<g class="ax {" ".join(names)}">{body}</g>' for body, names in drawn.items())
    same = "" if difference is None else "The lines of the runs are equal."
    if difference:
        same = f"The lines of the runs coincide: they differ by at most {chart.difference(difference)}."
    words = f"{chart.title}. {' '.join(_sentence(chart, line) for line in chart.lines)} {same}".rstrip()
    note = "".join(f'<p class="note">{escape(text)}</p>' for text in (chart.note, same) if text)
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(words)}">{vertical.drawn}{groups}</svg>'
        f"{note}<details><summary>Key points</summary>{_key_points(chart)}</details></figure>"
    )


def _turns(lines: Sequence[Line]) -> tuple[dict[int, str], float | None]:
    """Return attributes of style by index of a line, so that lines that coincide all stay visible.

    Also returns the largest difference between the lines, if all coincide with those of the same kind; else None.
    """
    dashes: dict[int, str] = {}
    differences = []
    for dashed in (False, True):
        group = [index for index, line in enumerate(lines) if line.dashed == dashed]
        if not group:
            continue
        apart = _difference([lines[index] for index in group])
        differences.append(apart)
        if apart is not None:
            for turn, index in enumerate(group):
                gap = DASH * (len(group) - 1)
                dashes[index] = (
                    f' style="stroke-dasharray:{DASH} {gap};stroke-dashoffset:{-DASH * turn};stroke-linecap:butt"'
                )
    known = [apart for apart in differences if apart is not None]
    return dashes, max(known) if len(known) == len(differences) else None


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


def _drawings(
    chart: LineChart, axis: str, vertical: VerticalAxis, columns: int, dashes: Mapping[int, str]
) -> tuple[str, ...]:
    """Return the SVG of one axis, and that of the lines and marks over it.

    dashes: attributes of style by index of a line.
    """
    ends = [line.x[axis][np.isfinite(line.x[axis])] for line in chart.lines]
    known = np.concatenate([*ends, np.array([mark.x[axis] for mark in chart.marks if np.isfinite(mark.x[axis])])])
    if not len(known):
        return (f'<text x="{WIDTH / 2}" y="{HEIGHT / 2}" text-anchor="middle">not recorded</text>',)
    low, high = min(0.0, float(known.min())), float(known.max())
    if float(known.min()) > 0.5 * high:  # a run that was resumed in another folder starts late
        low = float(known.min())
    if high - low <= 1e-9 * abs(high):  # one place, or huge ones that 64 bits hardly distinguish
        high = low + max(1.0, 1e-6 * abs(low))
    horizontal = HorizontalAxis(low, high, AXES[axis])
    marks = [(mark, float(horizontal.at(np.array([mark.x[axis]]))[0])) for mark in chart.marks]
    many = any(line.run for line in chart.lines)
    parts = [_mark(mark, x, many) for mark, x in _thinned(marks)]

    def path(line: Line, y: Column, most: int, spikes: bool = True) -> tuple[str, Column, Column]:
        points = envelope(line.x[axis], y, horizontal.low, horizontal.high, most, spikes=spikes)
        x, y = horizontal.at(points.x), vertical.at(points.y)
        return _path(x, y, points), x, y

    for index, line in enumerate(chart.lines):
        colour, style = f"c{line.run}", dashes.get(index, "")
        drawn, x, y = path(line, line.y, columns // 2 if line.dashed else columns)
        if line.dashed:
            dots = "".join(f"M{px:.1f} {py:.1f}h0" for px, py in zip(x, y, strict=True))
            parts.append(f'<path d="{drawn}" class="val {colour}"{style}/><path d="{dots}" class="dots {colour}"/>')
        elif not chart.smooth:
            parts.append(f'<path d="{drawn}" class="smooth {colour}"{style}/>')
        else:
            parts.append(f'<path d="{drawn}" class="raw {colour}"{style}/>')
            for name, share in SMOOTHING.items():
                if share:
                    drawn, _, _ = path(line, smoothed(line.y, share), columns // 3, spikes=False)
                    parts.append(f'<path d="{drawn}" class="smooth sm sm-{name} {colour}"{style}/>')
    return horizontal.drawn, "".join(parts)


def _thinned(marks: Sequence[tuple[RunMark, float]]) -> list[tuple[RunMark, float]]:
    """Return the marks that can be distinguished: of a run and kind at most one in 9 units of width.

    marks: each with its horizontal position in the drawing.
    """
    kept, last = [], dict[tuple[int, str], float]()
    for mark, x in sorted(marks, key=lambda pair: pair[1]):
        if not math.isfinite(x) or not LEFT <= x <= WIDTH - RIGHT:
            continue
        if x - last.get((mark.run, mark.kind), -math.inf) >= 9:
            last[mark.run, mark.kind] = x
            kept.append((mark, x))
    return kept


def _mark(mark: RunMark, x: float, many: bool) -> str:
    """Return the SVG of a mark: a triangle at the axis for a checkpoint, a line for a restart.

    many: whether there are several runs. They often save at the same steps, so each has its own height.
    """
    title = f"<title>{escape(mark.words)}</title>"
    if mark.kind == "restart":
        return (
            f'<g class="restart c{mark.run}"><line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{x:.1f}" y="{TOP - 6}" text-anchor="middle">{MARKS["restart"]}</text>{title}</g>'
        )
    y = HEIGHT - BOTTOM - 1 - 5 * mark.run * many
    return f'<path d="M{x - 2.5:.1f} {y}h5l-2.5-4.5z" class="saved c{mark.run}">{title}</path>'


def _path(x: Column, y: Column, points: Points) -> str:
    """Return the `d` of a path through points, in tenths of a unit, relative where that is shorter."""
    tens_x, tens_y = np.rint(10 * x).astype(int).tolist(), np.rint(10 * y).astype(int).tolist()
    commands, last_x, last_y = [], 0, 0
    for px, py, start in zip(tens_x, tens_y, points.starts.tolist(), strict=True):
        if start:
            commands.append(f"M{px / 10:g} {py / 10:g}h0")  # a point alone is a dot, with round ends
        elif px == last_x:
            commands.append(f"v{(py - last_y) / 10:g}")
        else:
            down = (py - last_y) / 10
            commands.append(f"l{(px - last_x) / 10:g}{' ' * (down >= 0)}{down:g}")
        last_x, last_y = px, py
    return "".join(commands)


def _sentence(chart: LineChart, line: Line) -> str:
    """Return a sentence that describes a line."""
    extremes = _extreme_points(line)
    if not extremes:
        return f"{line.name}: no finite value."
    first, last, low, high = extremes
    steps = line.x["step"]

    def said(index: int) -> str:
        return f"{chart.words(float(line.y[index]))} at step {steps[index]:,.0f}"

    if first == last:
        return f"{line.name}: {said(first)}."
    return f"{line.name}: from {said(first)} to {said(last)}; lowest {said(low)}, highest {said(high)}."


def _extreme_points(line: Line) -> tuple[int, int, int, int] | None:
    """Return the indices of the first, last, smallest and largest finite value; None if there is none."""
    fine = np.flatnonzero(np.isfinite(line.y))
    if not len(fine):
        return None
    values = line.y[fine]
    return int(fine[0]), int(fine[-1]), int(fine[values.argmin()]), int(fine[values.argmax()])


def _key_points(chart: LineChart) -> str:
    """Return a table of the first, smallest, largest and last value of every line."""
    rows = []
    for line in chart.lines:
        extremes = _extreme_points(line)
        cells = ["–"] * 4
        if extremes:
            first, last, low, high = extremes
            cells = [
                f"{escape(chart.words(float(line.y[index])))} <small>at {line.x['step'][index]:,.0f}</small>"
                for index in (first, low, high, last)
            ]
        missing = int((~np.isfinite(line.y)).sum())
        rows.append(f"<tr><td>{escape(line.name)}</td>{''.join(f'<td>{cell}</td>' for cell in (*cells, missing))}</tr>")
    heads = ("line", "first", "lowest", "highest", "last", "missing")
    head = "".join(f"<th>{words}</th>" for words in heads)
    return f'<div class="scroll"><table class="points"><tr>{head}</tr>{"".join(rows)}</table></div>'
