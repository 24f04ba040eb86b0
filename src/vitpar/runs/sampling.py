"""Thinning and smoothing of long series for charts that are some hundred pixels wide."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vitpar.runs.metrics import Column

GAP = 5.0
"""Distance of two rows, in medians of the distances, above which a line is interrupted."""


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
