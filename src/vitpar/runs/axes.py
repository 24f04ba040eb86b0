"""Axes of charts as SVG: round ticks, linear and logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

import numpy as np

from vitpar.runs.metrics import Column

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 236, 62, 20, 22, 40
"""Size and margins of a chart, in units of the view box."""
LOG_SPAN = 50.0
"""Ratio of the largest to the usual smallest value above which a chart may have a logarithmic axis."""
Words = Callable[[float], str]
"""Function that formats a number."""


class VerticalAxis:
    """Vertical axis of a chart. `drawn` is its SVG.

    values: all finite values of the chart, at least one.
    tick: formats a value at the axis.
    zero: whether the axis starts at 0.
    log: whether it is logarithmic if the values span a large range.
    share: whether values are shares: the axis ends at 1 at most, and at 0.01 at least.
    """

    def __init__(self, values: Column, tick: Words, *, zero: bool, log: bool, share: bool = False) -> None:
        low, high = float(values.min()), float(values.max())
        self._log = log and low > 0 and high > LOG_SPAN * float(np.quantile(values, 0.05))
        if self._log:
            low, high = math.log10(low), math.log10(high)
        elif zero:
            low, high = min(low, 0.0), max(high, 0.01 if share else 0.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant line is in the middle, unless it starts at 0
            around = max(abs(high), abs(low)) * 0.5 or 1.0
            low, high = (low if zero else low - around), high + around
        space = 0.04 * (high - low)
        self._low = low if zero and not self._log and low == 0 else low - space
        self._high = high + space
        if share:
            self._high = min(self._high, 1.0)
        ticks = self._log_ticks() if self._log else round_ticks(self._low, self._high)
        scale = f'<text x="{WIDTH - RIGHT}" y="{TOP - 8}" text-anchor="end" class="small">logarithmic</text>'
        self.drawn = scale if self._log else ""
        for value in ticks:
            y = self.at(np.array([value]))[0]
            self.drawn += (
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
                f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(tick(value))}</text>'
            )

    def at(self, values: Column) -> Column:
        """Return the vertical position of values in the drawing."""
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.log10(values) if self._log else values
        share = (scaled - self._low) / (self._high - self._low)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - np.clip(share, -0.02, 1.02))

    def _log_ticks(self) -> list[float]:
        """Return powers of ten within the axis, not more than 6, or round numbers if there are fewer than 2."""
        first, last = math.ceil(self._low), math.floor(self._high)
        step = max(1, math.ceil((last - first + 1) / 6))
        powers = [10.0**exponent for exponent in range(first, last + 1, step)]
        return powers if len(powers) > 1 else round_ticks(10**self._low, 10**self._high)


class HorizontalAxis:
    """Horizontal axis of a chart. `drawn` is its SVG.

    low, high: its ends.
    name: its name.
    """

    def __init__(self, low: float, high: float, name: str) -> None:
        self.low, self.high = low, high
        self.drawn = ""
        bottom = HEIGHT - BOTTOM
        for value in round_ticks(low, high):
            x, words = float(self.at(np.array([value]))[0]), compact(value)
            # A long number at the right end would leave the chart.
            anchor = "end" if x + 4.5 * len(words) > WIDTH else "middle"
            self.drawn += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" class="tick"/>'
            self.drawn += f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{words}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        self.drawn += f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle" class="small">{escape(name)}</text>'

    def at(self, values: Column) -> Column:
        """Return the horizontal position of values in the drawing."""
        return LEFT + (values - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers from `low` to `high`."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    for times in (1, 2, 5, 10, 20):
        first, last = math.ceil(low / (step * times) - 1e-9), math.floor(high / (step * times) + 1e-9)
        if last - first < most:
            break
    return [number * step * times for number in range(first, last + 1)]


def compact(value: float) -> str:
    """Return a number in few characters: `0.25`, `1,500`, `20 k`, `1.5 M`."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 10 * scale or (unit != "k" and abs(value) >= scale):
            return f"{value / scale:.4g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
