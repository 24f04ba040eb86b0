"""Thinning and smoothing of long series for charts that are some hundred pixels wide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitpar.runs.metrics import Column

GAP = 5.0
"""Distance of two rows, in medians of the distances, above which a line is interrupted."""
Flags = NDArray[np.bool_]
"""One truth value for each row."""


def shared_steps(series: Sequence[tuple[Column, Column]], columns: int) -> Column:
    """Return the steps at which the lines of a chart keep their rows.

    These are all steps, or for long lines those of the smallest and the largest value of each line in each of `columns`
    parts of the axis. So every spike stays visible, and lines keep the same steps: their values can be compared.

    series: (steps, values) of each line. The steps of a line ascend.
    """
    steps = [step for step, _ in series if len(step)]
    if not steps or max(map(len, steps)) <= 2 * columns:
        return np.unique(np.concatenate([*steps, np.empty(0)]))
    low, high = min(step[0] for step in steps), max(step[-1] for step in steps)
    kept = []
    for step, y in series:
        fine = np.isfinite(y)
        part = _parts(step[fine], low, high, columns)
        order = np.lexsort((y[fine], part))
        last = np.append(part[1:] != part[:-1], True)[: len(part)]
        first = np.append(True, last[:-1])[: len(part)]
        kept.append(step[fine][order][first | last])
        kept += [step[:1], step[-1:]]
    return np.unique(np.concatenate(kept))


def drawn_rows(step: Column, y: Column, shared: Column, columns: int) -> tuple[NDArray[np.int64], Flags]:
    """Return the indices of the rows of a line that are drawn, and before which of them the line is interrupted.

    It is interrupted where values are missing or not finite, and by gaps in the steps; in a thinned line only where
    that can be seen.

    shared: result of `shared_steps`.
    """
    fine = np.flatnonzero(np.isfinite(y))
    if not len(fine):
        return fine, np.zeros(0, dtype=np.bool_)
    kept = np.isin(step[fine], shared)
    jumps = np.diff(step[fine])
    broken = (np.diff(fine) > 1) | (jumps > GAP * float(np.median(np.diff(step))) if len(step) > 1 else False)
    if not kept.all():
        broken &= jumps > 2 * (shared[-1] - shared[0]) / columns
    pieces = np.append(0, np.cumsum(broken))[kept]
    return fine[kept], np.append(False, np.diff(pieces) > 0)[: len(pieces)]


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


def _parts(step: Column, low: float, high: float, columns: int) -> NDArray[np.int64]:
    """Return the part of the axis from `low` to `high` that each step is in."""
    width = (high - low) / columns if high > low else 1.0
    return np.clip((step - low) / width, 0, columns - 1).astype(np.int64)
