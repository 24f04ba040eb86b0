"""Downsampling and smoothing of long series for charts that are a few hundred pixels wide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.runs.metrics import Column

Indices = NDArray[np.int64]
"""Indices of rows."""

GAP = 5.0
"""Distance of two rows, in medians of the distances, above which a line is interrupted."""


@dataclass(frozen=True)
class Points:
    """Points of a line, in the order of x."""

    x: Column
    """Positions on the horizontal axis."""
    y: Column
    """Finite values."""
    starts: Column
    """1 where a piece of the line starts, 0 where a point is joined with the one before."""


def envelope(x: Column, y: Column, low: float, high: float, columns: int, *, spikes: bool = True) -> Points:
    """Return at most two points of a line for each pixel column: its smallest and its largest value, in their order.

    So every spike stays visible. If there are more points than that, x is the middle of the column. Pieces are
    separated where values are missing or not finite, and by gaps in x.

    low, high: ends of the horizontal axis.
    spikes: False for a line that was smoothed, which needs only one value of each column.
    """
    fine = np.isfinite(x) & np.isfinite(y)
    bad_before = np.cumsum(~fine)[fine]
    x, y = x[fine], y[fine]
    if not len(x):
        return Points(x, y, x)
    order = np.argsort(x, kind="stable")
    x, y, bad_before = x[order], y[order], bad_before[order]
    width = (high - low) / columns if high > low else 1.0
    column = np.clip((x - low) / width, 0, columns - 1).astype(int)
    dense = len(x) > 2 * columns
    kept: Indices = np.arange(len(x), dtype=np.int64)
    if dense:
        first = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
        kept = _extremes(y, first) if spikes else (first + np.append(first[1:], len(y)) - 1) // 2
    usual = float(np.median(np.diff(x))) if len(x) > 1 else 0.0
    x, y, bad_before, column = x[kept], y[kept], bad_before[kept], column[kept]
    if dense and spikes:
        x = low + (column + 0.5) * width
    apart = np.diff(column)
    broken = (np.diff(bad_before) > 0) & (apart > 1) | (np.diff(x) > GAP * usual) & (apart > 2)
    if len(fine) <= 2 * columns:  # every missing value can be seen
        broken |= np.diff(bad_before) > 0
    return Points(x, y, np.append(1.0, broken))


def _extremes(y: Column, first: Indices) -> Indices:
    """Return the indices of the smallest and the largest value of each group, in ascending order.

    first: index of the first value of each group.
    """
    ends = np.append(first[1:], len(y))
    pairs = (
        (start + int(y[start:end].argmin()), start + int(y[start:end].argmax()))
        for start, end in zip(first.tolist(), ends.tolist(), strict=True)
    )
    return np.unique(np.fromiter((index for pair in pairs for index in pair), dtype=np.int64))


def smoothed(y: Column, share: float) -> Column:
    """Return the mean of the finite values in a centred window; NaN where the value itself is not finite.

    share: width of the window, as a fraction of all rows.
    """
    fine = np.isfinite(y)
    half = max(1, round(share * len(y))) // 2
    if half == 0:
        return y
    index = np.arange(len(y))
    left, right = np.maximum(index - half, 0), np.minimum(index + half + 1, len(y))
    sums = np.append(0.0, np.cumsum(np.where(fine, y, 0.0)))
    counts = np.append(0, np.cumsum(fine))
    total = np.maximum(counts[right] - counts[left], 1)
    return np.where(fine, (sums[right] - sums[left]) / total, np.nan)
