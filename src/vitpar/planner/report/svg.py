"""Charts as SVG text: lines and points, stacked bars, a pipeline's timeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from vitpar.planner.cost.pipeline import Event
from vitpar.planner.report.data import ACTIONS

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
WIDTH = 860


def frontier(points: Sequence[tuple[float, float, str]], limit: float, unit: str) -> str:
    """Points (memory of a rank in `unit`, images/s, words), joined, with a line at `limit`."""
    height, left, bottom = 300, 70, 40
    most_x = 1.1 * max(*(x for x, _, _ in points), min(limit, 2 * max(x for x, _, _ in points)))
    most_y = 1.1 * max(y for _, y, _ in points)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / most_x * (WIDTH - left - 20), (height - bottom) * (1 - y / most_y) + 10

    parts = [_axes(left, height - bottom + 10, most_x, most_y, f"{unit} a rank", "images/s")]
    if limit <= most_x:
        x, _ = at(limit, 0)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="10" y2="{height - bottom + 10}" class="limit"/>')
        parts.append(f'<text x="{x - 4:.1f}" y="22" text-anchor="end" class="small">budget</text>')
    places = [at(x, y) for x, y, _ in points]
    parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" class="line"/>')
    for (x, y), (memory, speed, words) in zip(places, points, strict=True):
        title = escape(f"{words}: {speed:,.0f} images/s, {memory:.3g} {unit}")
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[0]}"><title>{title}</title></circle>')
    return _svg(height, parts)


def lines(series: Mapping[str, Sequence[float]], ticks: Sequence[str], unit: str) -> str:
    """A line for each of `series` over equally distant `ticks`."""
    height, left, bottom = 300, 70, 40
    most = 1.1 * max(value for values in series.values() for value in values)
    step = (WIDTH - left - 60) / max(1, len(ticks) - 1)
    parts = [_axes(left, height - bottom + 10, 0.0, most, "", unit)]
    for number, tick in enumerate(ticks):
        x = left + 20 + number * step
        parts.append(f'<text x="{x:.1f}" y="{height - 8}" text-anchor="middle" class="small">{escape(tick)}</text>')
    for number, (name, values) in enumerate(series.items()):
        places = [(left + 20 + n * step, (height - bottom) * (1 - value / most) + 10) for n, value in enumerate(values)]
        colour = COLOURS[number % len(COLOURS)]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), value in zip(places, values, strict=True):
            title = escape(f"{name}: {value:,.0f} {unit}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{title}</title></circle>')
    return _svg(height, parts) + legend(list(series))


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, limit: float | None = None) -> str:
    """A stacked horizontal bar for each (name, parts), with a line at `limit`."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    totals = [sum(parts.values()) for _, parts in rows]
    most = 1.05 * max(*totals, limit if limit is not None and limit < 3 * max(totals) else 0.0)
    left, right, each = 110, 90, 26
    scale = (WIDTH - left - right) / most
    drawn = []
    for row, (name, parts) in enumerate(rows):
        x, y = float(left), row * each + 4
        drawn.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>')
        for part, value in parts.items():
            colour = COLOURS[names.index(part) % len(COLOURS)]
            title = escape(f"{part}: {value:.4g} {unit}")
            width = value * scale
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{each - 6}" fill="{colour}">'
                f"<title>{title}</title></rect>"
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 15}" class="small">{totals[row]:.3g} {unit}</text>')
    height = len(rows) * each + 8
    if limit is not None and limit <= most:
        x = left + limit * scale
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" class="limit"/>')
    return _svg(height, drawn) + legend(names)


def timeline(events: Sequence[Event], seconds: float) -> str:
    """What every place of the pp axis computes over a step."""
    places = sorted({event.pp for event in events})
    left, each = 60, 30
    scale = (WIDTH - left - 10) / seconds
    colours = {"F": COLOURS[0], "B": COLOURS[4], "I": COLOURS[3], "W": COLOURS[1]}
    drawn = []
    for row, pp in enumerate(places):
        drawn.append(f'<text x="{left - 8}" y="{row * each + 21}" text-anchor="end">pp {pp}</text>')
        drawn.append(
            f'<rect x="{left}" y="{row * each + 4}" width="{WIDTH - left - 10}" height="{each - 6}" class="idle"/>'
        )
        for event in events:
            if event.pp != pp:
                continue
            x, width = left + event.start * scale, max(0.4, (event.end - event.start) * scale)
            words = f"{event.kind} of micro-batch {event.microbatch}, stage {event.stage}: "
            title = escape(f"{words}{event.start * 1e3:.2f} to {event.end * 1e3:.2f} ms")
            drawn.append(
                f'<rect x="{x:.1f}" y="{row * each + 4}" width="{width:.1f}" height="{each - 6}" '
                f'fill="{colours[event.kind]}" class="event"><title>{title}</title></rect>'
            )
            if width > 14:
                drawn.append(
                    f'<text x="{x + width / 2:.1f}" y="{row * each + 20}" text-anchor="middle" class="number">'
                    f"{event.microbatch}</text>"
                )
    shown = [kind for kind in ACTIONS if any(event.kind == kind for event in events)]
    keys = "".join(_key(colours[kind], ACTIONS[kind]) for kind in shown)
    return _svg(len(places) * each + 4, drawn) + f'<div class="legend">{keys}</div>'


def legend(names: Sequence[str]) -> str:
    """Colours and what they stand for."""
    keys = "".join(_key(COLOURS[n % len(COLOURS)], name) for n, name in enumerate(names))
    return f'<div class="legend">{keys}</div>'


def _key(colour: str, name: str) -> str:
    return f'<span><i style="background:{colour}"></i>{escape(name)}</span>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _axes(left: float, bottom: float, most_x: float, most_y: float, x_words: str, y_words: str) -> str:
    """Lines and ticks."""
    found = [f'<text x="{left}" y="8" class="small">{escape(y_words)}</text>']
    for value in _ticks(most_y):
        y = (bottom - 10) * (1 - value / most_y) + 10
        found.append(f'<line x1="{left}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        found.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" class="small">{value:,.4g}</text>')
    for value in _ticks(most_x) if most_x else ():
        x = left + value / most_x * (WIDTH - left - 20)
        found.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle" class="small">{value:,.4g}</text>')
    if x_words:
        found.append(
            f'<text x="{WIDTH - 20}" y="{bottom + 28:.1f}" text-anchor="end" class="small">{escape(x_words)}</text>'
        )
    return "".join(found)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, about five."""
    step = 10 ** math.floor(math.log10(most / 4))
    step *= next(times for times in (1, 2, 5, 10) if most / (step * times) <= 6)
    return [n * step for n in range(int(most / step) + 1)]
