"""Charts of plans for Plotly: stacked bars, timelines, and lines over a few values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitpar.runs.pages.plotly import Figure, Key

ACTIONS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
"""Names of pipeline actions by the computations of ``vitpar.planner.cost.pipeline``."""
COLOURS = {
    "forward": "#0072b2",
    "backward": "#56b4e9",
    ACTIONS["I"]: "#56b4e9",  # the first part of backward
    ACTIONS["W"]: "#b5e0fb",
    "teacher": "#99cc99",
    "other": "#3b3b3b",
    "tensor": "#e69f00",
    "gather": "#f0e442",
    "gathered": "#f0e442",
    "gradients": "#d55e00",
    "redistribution": "#cc79a7",
    "waiting": "#d9d9d9",
    "optimizer": "#009e73",
    "parameters": "#7570b3",
    "activations": "#882255",
    "workspace": "#ddcc77",
    "buffers": "#e8c4e8",
    "reserved": "#4d2e10",
}
"""One colour for each meaning in all charts, in the order in which bars are stacked.

They are distinct with red-green colour blindness too (a test simulates it). Parts of a step's time have Okabe and Ito's
colours, parts of memory others.
"""
LOG_SPAN = 20.0
"""Ratio of the largest to the smallest value of a sweep above which its axis is logarithmic."""
MESSAGE = "#666666|#bbbbbb"
"""Colour of messages in the light and the dark theme."""
SERIES = (
    ("#2f5bd0", "#5b8cff"),
    ("#c44e00", "#ff7d33"),
    ("#009a70", "#2fd6a3"),
    ("#8f2a7a", "#f0a3cf"),
    ("#000000", "#ffffff"),
    ("#3f9ad6", "#9adcff"),
)
"""Colours of runs and of series in the light and the dark theme, distinct with red-green colour blindness too (a test
simulates it). They have no other meaning in charts (`COLOURS`)."""
MARKS = {"circle": "●", "square": "■", "triangle-up": "▲", "diamond": "◆", "triangle-down": "▼", "cross": "✚"}
"""Marks of series, since colours alone do not reach all readers: Plotly's names, and characters for legends."""
SIDES = {"l": 74, "r": 74, "t": 8, "b": 32}
"""Margins of a chart of rows, in pixels."""
MOST_SPANS = 3000
"""Maximum number of actions, and of messages, in a timeline: a page with more would be slow."""
EACH, AROUND = 30, 46
"""Height of a row of bars, and of what is above and below them, in pixels."""
BUTTONS = 28
"""Space for Plotly's buttons above a chart, in pixels."""
EDGE = {"color": "#88888888", "width": 0.5}
"""Edge of bars, which separates neighbours of a colour, and dark ones from a dark page."""
BANDS = Key("bands", "#888888", "I")
"""Key of the error bars of a chart."""


@dataclass(frozen=True)
class Span:
    """An action of a rank in a timeline."""

    row: str
    """Row of the timeline, such as a place of the pp axis."""
    what: str
    """Part of the step, a key of `COLOURS`."""
    start: float
    """Start, from the beginning of the step."""
    end: float
    """End, from the beginning of the step."""
    microbatch: int | None = None
    """Index of the micro-batch; None for what belongs to no micro-batch."""
    stage: int = 0
    """Index of the pipeline stage."""

    @property
    def words(self) -> str:
        """Action as text, as in `forward of micro-batch 3, stage 0`."""
        return self.what + ("" if self.microbatch is None else f" of micro-batch {self.microbatch}, stage {self.stage}")


@dataclass(frozen=True)
class SentMessage:
    """A message from one row of a timeline to another."""

    source: str
    """Row that sends."""
    target: str
    """Row that receives."""
    sent: float
    """Moment at which it is ready to be sent."""
    arrived: float
    """Moment at which it has arrived."""
    words: str
    """Content, as in `output of stage 0 for micro-batch 3`."""


def series_colour(number: int) -> str:
    """Return the colour of a series in both themes, as the page's script reads it."""
    return "|".join(SERIES[number % len(SERIES)])


def series_mark(number: int) -> str:
    """Return the mark of a series, by Plotly's name."""
    return list(MARKS)[number % len(MARKS)]


def series_key(name: str, number: int) -> Key:
    """Return the key of a series for the legend."""
    return Key(name, series_colour(number), MARKS[series_mark(number)])


def rows_of(spans: Sequence[Span]) -> list[str]:
    """Return the rows of a timeline from the top; places of the pp axis in the order of their index."""
    return sorted(
        {span.row for span in spans}, key=lambda row: (int(row.removeprefix("pp ")) if "pp" in row else 0, row)
    )


def bars(
    title: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    words: Callable[[float], str],
    unit: tuple[str, float],
    limit: float | None = None,
    note: str = "",
) -> Figure:
    """Return a stacked horizontal bar for each (name, values by part).

    words: formats a value.
    unit: name of the axis' unit, and its size.
    limit: value at which there is a line; None for none.
    """
    names, (axis, size) = [name for name, _ in rows], unit
    totals = [sum(values.values()) for _, values in rows]
    parts = [part for part in COLOURS if any(values.get(part) for _, values in rows)]
    cells = [[name, *(words(values[part]) if values.get(part) else "" for part in parts)] for name, values in rows]
    traces = [
        _bar(
            part,
            names,
            [values.get(part, 0.0) / size for _, values in rows],
            [f"{row[0]}: {part} {row[number]}" for row in cells],
        )
        for number, part in enumerate(parts, start=1)
    ]
    most = max(*totals, limit if limit is not None and limit < 3 * max(totals) else 0.0) / size
    # The total stands behind each bar.
    ends = {"x": [total / size for total in totals], "y": names, "text": [f" {words(total)}" for total in totals]}
    traces.append({**ends, "mode": "text", "hoverinfo": "skip", "textposition": "middle right", "cliponaxis": False})
    layout = _rows(names) | {"xaxis": {"range": [0, 1.02 * most], "ticksuffix": f" {axis}"}}
    if limit is not None and limit / size <= most:
        layout |= budget(limit / size, f"budget {words(limit)}") | {"margin": SIDES | {"t": 20}}
    keys = [Key(part, COLOURS[part]) for part in parts]
    data = {"traces": traces, "layout": layout, "fixed": True}
    return Figure(title, data, ["", *parts], cells, [note], keys, EACH * len(rows) + AROUND)


def _bar(
    part: str, rows: Sequence[str], lengths: Sequence[float], words: Sequence[str], **attributes: Any
) -> dict[str, Any]:
    """Return horizontal bars of a part of a step or of memory. words: what the pointer shows of each."""
    marker = {"color": COLOURS[part], "line": EDGE}
    bar = {"type": "bar", "orientation": "h", "name": part, "y": rows, "x": lengths, "marker": marker}
    return {**bar, "customdata": words, "hovertemplate": "%{customdata}<extra></extra>", **attributes}


def _rows(names: Sequence[str]) -> dict[str, Any]:
    """Return the layout of a chart with a row for each name, from the top."""
    return {
        "barmode": "stack",
        "bargap": 0.2,
        "margin": SIDES,
        "yaxis": {"type": "category", "categoryarray": names, "autorange": "reversed", "showgrid": False, "dtick": 1},
    }


def budget(x: float, words: str, log: bool = False, inside: bool = False) -> dict[str, Any]:
    """Return the part of a layout that draws a vertical line at `x`, with words at its top.

    log: whether the axis is logarithmic.
    inside: whether the words are inside the chart, not above it.
    """
    line = {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    # Plotly places annotations on a logarithmic axis by the logarithm, and shapes by the value.
    place = {"x": math.log10(x) if log else x, "y": 1, "yref": "paper", "xanchor": "right"}
    text = {"text": words, "yanchor": "top" if inside else "bottom", "showarrow": False, "font": {"size": 11}}
    return {
        "shapes": [{**line, "line": {"color": "#dd3333", "dash": "dash", "width": 1.5}}],
        "annotations": [{**place, **text}],
    }


def timeline(
    title: str,
    spans: Sequence[Span],
    seconds: float,
    unit: str | None = None,
    messages: Sequence[SentMessage] = (),
    note: str = "",
) -> Figure:
    """Return the actions of every row of `spans` over a step, and the messages between rows.

    unit: unit of `seconds` and of the spans, empty for none; None for seconds.
    """
    cut = f"The first {MOST_SPANS:,} of {len(spans):,} actions are shown." if len(spans) > MOST_SPANS else ""
    spans, messages = spans[:MOST_SPANS], messages[:MOST_SPANS]
    rows = rows_of(spans)
    factor = 1.0 if unit is not None or seconds >= 1 else 1e3 if seconds >= 1e-3 else 1e6
    unit = {1.0: " s", 1e3: " ms", 1e6: " µs"}[factor] if unit is None else unit

    def time(moment: float) -> float:
        return float(f"{moment * factor:.6g}")

    def said(words: str, start: float, end: float) -> str:
        return f"{words}: {start * factor:,.2f} to {end * factor:,.2f}{unit}"

    by_part = {what: mine for what in COLOURS if (mine := [span for span in spans if span.what == what])}
    traces = [
        _bar(
            what,
            [span.row for span in mine],
            [time(span.end - span.start) for span in mine],
            [said(span.words, span.start, span.end) for span in mine],
            base=[time(span.start) for span in mine],
            text=["" if span.microbatch is None else str(span.microbatch) for span in mine],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
        )
        for what, mine in by_part.items()
    ]
    if messages:
        # A line for each message, from the moment it is ready at the sender to its arrival.
        words = [said(one.words, one.sent, one.arrived) for one in messages]
        ends = {
            "x": [x for one in messages for x in (time(one.sent), time(one.arrived), None)],
            "y": [y for one in messages for y in (one.source, one.target, None)],
            "customdata": [text for one in words for text in (one, one, "")],
        }
        line = {"mode": "lines", "name": "messages", "line": {"color": MESSAGE, "width": 1}}
        traces.append({**ends, **line, "hovertemplate": "%{customdata}<extra></extra>"})
    layout = _rows(rows) | {
        "barmode": "overlay",
        "margin": SIDES | {"t": BUTTONS},
        "uniformtext": {"minsize": 8, "mode": "hide"},
        "xaxis": {"range": [0, time(seconds)], "ticksuffix": unit},
    }
    layout["yaxis"] |= {"fixedrange": True}
    sums = [
        [what, f"{sum(span.end - span.start for span in mine) * factor:,.1f}{unit}"] for what, mine in by_part.items()
    ]
    keys = [Key(one["name"], COLOURS.get(one["name"], MESSAGE)) for one in traces]
    data = {"traces": traces, "layout": layout}
    height = EACH * len(rows) + AROUND + BUTTONS - SIDES["t"]
    return Figure(title, data, ["", "in sum"], sums, [note, cut], keys, height)


@dataclass(frozen=True)
class Series:
    """A line over a few values."""

    name: str
    """Name."""
    values: Sequence[float | None]
    """Values; None where there is none."""
    bands: Sequence[float] = ()
    """Uncertainty of each value, as a share of it; empty if none is known."""
    words: Sequence[str] = ()
    """Further text that the pointer shows of each value; empty for none."""


def sweep(title: str, series: Sequence[Series], ticks: Sequence[str], axes: tuple[str, str], note: str = "") -> Figure:
    """Return lines over equally distant `ticks`. axes: names of the horizontal and the vertical axis."""
    traces = []
    for number, one in enumerate(series):
        colour = series_colour(number)
        line = {
            "mode": "lines+markers",
            "name": one.name,
            "x": ticks,
            "y": one.values,
            "line": {"color": colour, "width": 1.7},
            "marker": {"color": colour, "symbol": series_mark(number), "size": 7},
            "customdata": one.words,
            "hovertemplate": "%{y:,.4~g}" + ("<br>%{customdata}" if one.words else ""),
        }
        traces.append(line | ({"error_y": band(one.values, one.bands, colour)} if any(one.bands) else {}))
    known = [value for one in series for value in one.values if value]
    log = {"type": "log", "dtick": "D2", "tickformat": ".3~s"}
    vertical = log if max(known) > LOG_SPAN * min(known) else {"rangemode": "tozero"}
    layout = {
        "xaxis": {"type": "category", "title": {"text": axes[0]}},
        "yaxis": {"title": {"text": axes[1]}, **vertical},
        "hovermode": "x unified",
    }
    rows = []
    for one in series:  # with 4 digits or more, without an exponent
        cells = ("" if x is None else f"{x:,.0f}" if x >= 1000 else f"{x:.4g}" for x in one.values)
        rows.append([one.name, *cells])
    keys = [series_key(one.name, number) for number, one in enumerate(series)]
    keys += [BANDS] if any(any(one.bands) for one in series) else []
    return Figure(title, {"traces": traces, "layout": layout}, ["", *ticks], rows, [note], keys, 300)


def band(values: Sequence[float | None], shares: Sequence[float], colour: str) -> dict[str, Any]:
    """Return error bars of values, by the share of each."""
    sizes = [None if value is None else value * share for value, share in zip(values, shares, strict=True)]
    return {"type": "data", "array": sizes, "color": colour, "thickness": 1, "width": 4}
