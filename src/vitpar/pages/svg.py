"""Charts as SVG text: lines and points, stacked bars, timelines. Each has a label that describes it in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from vitpar.pages.spans import ACTIONS, Span, rows_of

COLOURS = {
    "forward": "#0072b2",
    "backward": "#56b4e9",
    ACTIONS["I"]: "#56b4e9",  # the first part of backward
    ACTIONS["W"]: "#b5e0fb",
    "tensor": "#e69f00",
    "gather": "#f0e442",
    "gathered": "#f0e442",
    "gradients": "#d55e00",
    "redistribution": "#cc79a7",
    "optimizer": "#009e73",
    "waiting": "#d9d9d9",
    "uneven": "#5b6770",
    "other": "#3b3b3b",
    "parameters": "#7570b3",
    "activations": "#882255",
    "workspace": "#ddcc77",
    "buffers": "#e8c4e8",
    "teacher": "#99cc99",
    "reserved": "#4d2e10",
}
"""One colour for each meaning in all charts, distinct with red-green colour blindness too (a test simulates it).

Parts of a step's time have Okabe and Ito's colours, parts of memory others.
"""
DARK = ("forward", "gradients", "optimizer", "other", "uneven", "activations")
"""Names whose colours are dark, so that text on them is white."""
DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 5")
MARKS = "●■▲◆▼"
"""Dashes and marks distinguish plans, since colours have other meanings."""
WIDTH, LEFT, RIGHT = 760, 74, 24
"""Width and margins of charts, in units of the view box."""
Words = Callable[[float], str]
"""Function that formats a number with its unit."""


def frontier(points: Sequence[tuple[float, float, str]], limit: float, unit: str) -> str:
    """Draw joined points (memory of a rank in `unit`, samples/s, title), with a vertical line at `limit`."""
    height, bottom = 300, 50
    most_x = 1.1 * max(*(x for x, _, _ in points), min(limit, 2 * max(x for x, _, _ in points)))
    most_y = 1.1 * max(y for _, y, _ in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most_x * (WIDTH - LEFT - RIGHT), (height - bottom - 16) * (1 - y / most_y) + 16

    parts = [_axes(height - bottom, most_x, most_y, f"{unit} of memory per rank", "samples/s")]
    if limit <= most_x:
        x, _ = at(limit, 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height - bottom}" class="limit"/>')
        parts.append(f'<text x="{x - 4:.1f}" y="28" text-anchor="end" class="small">budget</text>')
    places = [at(x, y) for x, y, _ in points]
    parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" class="line"/>')
    titles = [f"{words}: {speed:,.0f} samples/s, {memory:,.1f} {unit}" for memory, speed, words in points]
    for (x, y), title in zip(places, titles, strict=True):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="dot"><title>{escape(title)}</title></circle>')
    return _svg(height, parts, f"Speed over memory. {'; '.join(titles)}")


def lines(series: Mapping[str, Sequence[float]], ticks: Sequence[str], unit: str, words: str) -> str:
    """Draw a line for each of `series` over equally distant `ticks`, with a legend. words: description of the chart."""
    height, bottom = 290, 34
    most = 1.1 * max(value for values in series.values() for value in values)
    step = (WIDTH - LEFT - RIGHT - 40) / max(1, len(ticks) - 1)
    parts = [_axes(height - bottom, 0.0, most, "", unit)]
    for number, tick in enumerate(ticks):
        x = LEFT + 20 + number * step
        parts.append(f'<text x="{x:.1f}" y="{height - 12}" text-anchor="middle" class="small">{escape(tick)}</text>')
    for number, (name, values) in enumerate(series.items()):
        places = [
            (LEFT + 20 + n * step, (height - bottom - 16) * (1 - value / most) + 16) for n, value in enumerate(values)
        ]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{drawn}" class="line" stroke-dasharray="{DASHES[number % len(DASHES)]}"/>')
        for (x, y), value in zip(places, values, strict=True):
            mark = f"{MARKS[number % len(MARKS)]}<title>{escape(f'{name}: {value:,.0f} {unit}')}</title>"
            parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" class="mark">{mark}</text>')
    said = "; ".join(
        f"{name}: {', '.join(f'{v:,.0f} at {t}' for v, t in zip(values, ticks, strict=True))}"
        for name, values in series.items()
    )
    keys = (f"<span>{MARKS[n % len(MARKS)]} {escape(name)}</span>" for n, name in enumerate(series))
    return _svg(height, parts, f"{words}, {unit}. {said}") + f'<div class="legend">{"".join(keys)}</div>'


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: Words, limit: float | None = None) -> str:
    """Draw a stacked horizontal bar for each (name, parts), with a line at `limit` and a legend.

    unit: formats a number with its unit
    """
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    totals = [sum(parts.values()) for _, parts in rows]
    most = 1.02 * max(*totals, limit if limit is not None and limit < 3 * max(totals) else 0.0)
    right, each = 84, 26
    scale = (WIDTH - LEFT - right) / most
    drawn, said = [], []
    for row, (name, parts) in enumerate(rows):
        x, y = float(LEFT), row * each + 4
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for part, value in parts.items():
            width, title = value * scale, escape(f"{part}: {unit(value)}")
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{each - 6}" fill="{COLOURS[part]}">'
                f"<title>{title}</title></rect>"
            )
            x += width
        line = LEFT + limit * scale if limit is not None and limit <= most else 0.0
        x = line if x <= line < x + 60 else x  # keep the text off the line
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{unit(totals[row])}</text>')
        said.append(f"{name} {unit(totals[row])}: {', '.join(f'{part} {unit(v)}' for part, v in parts.items())}")
    height = len(rows) * each + 4
    if limit is not None and limit <= most:
        x = LEFT + limit * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" class="limit"/>')
        drawn.append(f'<text x="{x:.1f}" y="{height + 12}" text-anchor="middle" class="small">{unit(limit)}</text>')
        said.append(f"budget {unit(limit)}")
        height += 16
    return _svg(height, drawn, "; ".join(said)) + legend(names)


def timeline(spans: Sequence[Span], seconds: float, unit: str | None = None) -> str:
    """Draw the actions of every row of `spans` over a step, above a time axis.

    unit: unit of `seconds` and of the spans, empty for none; None for seconds.
    """
    rows, each = rows_of(spans), 30
    scale, bottom = (WIDTH - LEFT - RIGHT) / seconds, 30 * len(rows) + 4
    factor = 1.0 if unit is not None or seconds >= 1 else 1e3 if seconds >= 1e-3 else 1e6
    unit = {1.0: " s", 1e3: " ms", 1e6: " µs"}[factor] if unit is None else unit
    drawn = []
    for value in _ticks(seconds * factor):
        x = LEFT + value / factor * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" class="grid"/>')
        drawn.append(
            f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" class="small">{value:,.10g}{unit}</text>'
        )
    for row, name in enumerate(rows):
        y, whole = row * each + 4, WIDTH - LEFT - RIGHT
        drawn.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
        drawn.append(f'<rect x="{LEFT}" y="{y}" width="{whole}" height="{each - 6}" class="idle"/>')
        for span in (span for span in spans if span.row == name):
            x, width = LEFT + span.start * scale, max(0.4, (span.end - span.start) * scale)
            number = "" if span.microbatch is None else f" of micro-batch {span.microbatch}, stage {span.stage}"
            title = f"{span.what}{number}: {span.start * factor:,.2f} to {span.end * factor:,.2f}{unit}"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{each - 6}" '
                f'fill="{COLOURS[span.what]}" class="event"><title>{escape(title)}</title></rect>'
            )
            if width > 16 and span.microbatch is not None:
                shade = "#fff" if span.what in DARK else "#000"
                drawn.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" class="number" fill="{shade}">'
                    f"{span.microbatch}</text>"
                )
    done = {what: sum(s.end - s.start for s in spans if s.what == what) for what in COLOURS}
    said = ", ".join(f"{what} {total * factor:,.1f}{unit}" for what, total in done.items() if total)
    words = f"Timeline of {seconds * factor:,.1f}{unit} with the rows {', '.join(rows)}; in sum over them {said}"
    return _svg(bottom + 20, drawn, words) + legend([what for what, total in done.items() if total])


def legend(names: Sequence[str]) -> str:
    """Return a legend of the colours of `names`."""
    keys = (f'<span><i style="background:{COLOURS[name]}"></i>{escape(name)}</span>' for name in names)
    return f'<div class="legend">{"".join(keys)}</div>'


def _svg(height: float, parts: Sequence[str], words: str) -> str:
    """Return a chart in a box that scrolls on narrow pages. words: description for screen readers."""
    drawn = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(words)}">{"".join(parts)}</svg>'
    return f'<div class="scroll">{drawn}</div>'


def _axes(bottom: float, most_x: float, most_y: float, x_words: str, y_words: str) -> str:
    """Draw grid lines, ticks and names of the axes; no x axis if `most_x` is 0."""
    elements = [f'<text x="{LEFT}" y="8" class="small">{escape(y_words)}</text>']
    for value in _ticks(most_y):
        y = (bottom - 16) * (1 - value / most_y) + 16
        elements.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        elements.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" class="small">{value:,.10g}</text>')
    for value in _ticks(most_x) if most_x else ():
        x = LEFT + value / most_x * (WIDTH - LEFT - RIGHT)
        elements.append(
            f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle" class="small">{value:,.10g}</text>'
        )
    if x_words:
        x = (LEFT + WIDTH - RIGHT) / 2
        elements.append(
            f'<text x="{x}" y="{bottom + 36:.1f}" text-anchor="middle" class="small">{escape(x_words)}</text>'
        )
    return "".join(elements)


def _ticks(most: float) -> list[float]:
    """Return about five round numbers from 0 to `most`."""
    step = 10 ** math.floor(math.log10(most / 4))
    step *= next(times for times in (1, 2, 5, 10) if most / (step * times) <= 6)
    return [round(n * step, 12) for n in range(int(most / step) + 1)]
