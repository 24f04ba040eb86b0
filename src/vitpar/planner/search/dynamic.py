"""Dynamic programme over the layers and stages of one outline, with the memory of a stage as a state.

A label is a way to run the stage's layers so far: its costs (rows of `layer_sums`) and the strategy of its last layer.
Of the labels with equal token layout and about equally many bytes only the fastest is kept. Each stage takes as many
blocks as fit into memory and a cap of time; bisection finds the lowest cap under which all blocks find a stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitpar.planner.search.bounds import BYTES, EACH, ROWS, TIMES, LayerSums
from vitpar.planner.search.loads import Array, Indices
from vitpar.planner.search.tables import LayerTable

BINS = 96
"""Labels of a token layout that are kept at most, by their bytes."""
CLOSE = 1.01
"""Ratio of a cap that holds to one that does not, at which bisection stops."""
ALTERNATIVES = 10
"""Mixes that are returned at most, also with the same stages but the last."""
SIMPLER = 1e-3
"""Relative seconds that a change of strategy within a stage counts."""


@dataclass(frozen=True)
class LayerMix:
    """A split into stages, the first few or all, and a strategy for each of their layers."""

    seconds: float
    """Least seconds of a step, without what a step spends outside layers."""
    slowest: float
    """Seconds of the slowest stage, from its own first micro-batch on."""
    each: float
    """Seconds of a micro-batch in the last of the stages."""
    peaks: tuple[float, ...]
    """Bytes of each stage."""
    sizes: tuple[int, ...]
    """Number of blocks of each stage."""
    columns: tuple[int, ...]
    """Column of the strategy of each layer, embed and head included."""


@dataclass(frozen=True)
class _Step:
    """Labels after one layer."""

    sums: Array
    """Costs of the stage so far, [labels, ROWS]."""
    columns: Indices
    """Columns of the layer's strategies, [labels]."""
    parents: Indices
    """Labels of the layer before, [labels]."""
    peaks: Array
    """Bytes of the stage at its peak, [labels]."""


class Programme:
    """Fastest mixes of one outline.

    memory: bytes that the table's costs may reach, of each stage
    columns: columns to mix, of each section
    """

    def __init__(self, table: LayerTable, memory: Array, columns: Sequence[Indices]) -> None:
        self._columns = columns
        self._table, self._memory = table, memory
        sections, self._stages = table.sections, table.outline.pipeline.num_stages
        self._last = sections.depth + 1
        self._rows = [0, *sections.rows, len(sections.kinds) - 1]
        self._sections = [0, *sections.of_block, len(sections.sections) - 1]
        self._delays = not table.outline.pipeline.splits_backward

    def best(self, limit: float) -> list[LayerMix]:
        """Return the fastest mixes that were found of those that take less than `limit` seconds, the fastest first."""
        held = self._within(limit, limit) if limit > 0 else []
        found = held
        low = held[0].slowest / self._stages if held and self._stages > 1 else math.inf
        while held and held[0].slowest > CLOSE * low:
            cap = (held[0].slowest * low) ** 0.5
            mixes = self._within(cap, limit)
            if not mixes:
                low = cap
            else:
                held, found = mixes, found + mixes
        return sorted(found, key=lambda one: one.seconds)[:ALTERNATIVES]

    def _within(self, cap: float, limit: float) -> list[LayerMix]:
        """Return mixes of at most `limit` seconds whose stages take at most `cap` each, the fastest first."""
        table = self._table
        start, before, seconds, slowest = 0, 0.0, 0.0, 0.0
        sizes, columns, peaks = tuple[int, ...](), tuple[int, ...](), tuple[float, ...]()
        mixes = list[LayerMix]()
        for number in range(self._stages):
            caps = np.full(5, cap)
            caps[0] = min(cap, limit - self._delays * before)
            mixes = [
                LayerMix(
                    max(seconds, slowest, float(sums[TIMES].max()), float(sums[0]) + self._delays * before),
                    max(slowest, float(sums[TIMES].max())),
                    float(sums[EACH]),
                    (*peaks, peak),
                    (*sizes, len(chosen) - (number == 0) - (number == self._stages - 1)),
                    (*columns, *chosen),
                )
                for sums, peak, chosen in self._stage(number, start, caps, columns[-1:])
            ]
            if not mixes:
                break
            one = mixes[0]
            seconds, slowest, peaks, sizes, columns = one.seconds, one.slowest, one.peaks, one.sizes, one.columns
            start = len(columns)
            before += one.each + table.action + (2 * table.hops[number] if number < self._stages - 1 else 0.0)
        return mixes

    def _stage(
        self, number: int, start: int, caps: Array, former: Sequence[int]
    ) -> list[tuple[Array, float, list[int]]]:
        """Return (sums, bytes, columns) of the fastest ways to run most layers from `start` on in a stage, if any.

        caps: seconds that the stage may take by each row of `TIMES`
        former: column of the layer before, if any
        """
        table, last = self._table, number == self._stages - 1
        sums = table.sums(number)
        # Messages have the smaller parts of both sides. Those of the next stage are not known yet.
        arriving = np.minimum(table.sent(start), table.sent(start)[list(former)]) if former else table.images
        memory = float(self._memory[number])
        first = np.zeros((1, ROWS))
        # Neighbours that exchange messages take as long as these and the work of one of both (`bounds.queueing`).
        first[0, 0] += table.queued[max(0, number - 1) : number + 1].max(initial=0.0)
        steps = [_Step(first, np.array([-1]), np.array([0]), np.zeros(1))]
        ends: tuple[int, Array, Indices] = 0, np.zeros(0), np.zeros(0, dtype=np.int64)
        most = self._last if last else self._last - self._stages + number
        for layer in range(start, most + 1):
            step = self._extend(steps[-1], sums, layer, caps, memory, arriving)
            steps.append(step)
            if not len(step.columns):
                break
            peaks = step.peaks if last else step.peaks + table.sent(layer + 1)[step.columns]
            labels = np.nonzero(peaks <= memory)[0]
            if len(labels) and (layer == self._last if last else layer > 0):
                fastest = step.sums[labels][:, TIMES].max(1).argsort(kind="stable")
                ends = len(steps) - 1, peaks, labels[fastest[: ALTERNATIVES if last else 1]]
        at, peaks, labels = ends
        reached = steps[: at + 1]
        return [(reached[-1].sums[n], float(peaks[n]), _columns(reached, n)) for n in labels.tolist()]

    def _extend(self, step: _Step, costs: LayerSums, layer: int, caps: Array, memory: float, arriving: Array) -> _Step:
        """Return the labels after the next layer.

        arriving: bytes in front of the stage's first layer, by the layer's column
        """
        table, row, section = self._table, self._rows[layer], self._sections[layer]
        columns = self._columns[section]
        sums, before = step.sums[:, None] + costs.layers[:, row, columns].T, step.peaks[:, None]
        if step.columns[0] < 0:
            sums[..., BYTES] += arriving[columns, None]
            before = before + arriving[columns]
        else:
            # Of about equally fast mixes, one with few strategies.
            sums[..., TIMES] *= 1 + SIMPLER * (step.columns[:, None] != columns)[..., None]
            sums += table.edges(layer, step.columns, columns)[..., None] * table.waits
        # In the backward of an earlier layer, this one has left its gradients.
        in_backward = (sums[..., -2:] + costs.working[:, row, columns].T).max(-1)
        peak = np.maximum(np.maximum(before + costs.after[row, columns], in_backward), sums[..., BYTES.start])
        seconds, used = sums[..., TIMES].max(-1), sums[..., BYTES].max(-1)
        labels, places = np.nonzero((sums[..., TIMES] <= caps).all(-1) & (peak <= memory))
        if not len(labels):
            return _Step(np.zeros((0, ROWS)), labels, labels, np.zeros(0))
        sums, seconds, used, peak = (values[labels, places] for values in (sums, seconds, used, peak))
        columns, least = columns[places], used.min()
        bins = (BINS * (used - least) / max(1.0, used.max() - least)).astype(np.int64)
        keys = table.layout[columns] * (BINS + 1) + bins
        order = np.lexsort((peak, seconds, keys))
        fastest = order[np.diff(keys[order], prepend=-1) > 0]
        # Of the same layout, labels with more bytes have to be faster.
        grid = np.full((int(table.layout.max()) + 1) * (BINS + 1), np.inf)
        grid[keys[fastest]] = seconds[fastest]
        grid = np.minimum.accumulate(grid.reshape(-1, BINS + 1), 1).ravel()
        first = keys[fastest] % (BINS + 1) == 0
        # The fastest of each bin alone would add up to half a bin a layer: keep those with the least bytes, too.
        kept = [fastest[first | (seconds[fastest] < grid[keys[fastest] - 1])]]
        for memory_of_labels in (used, peak):
            smallest = np.lexsort((seconds, memory_of_labels, table.layout[columns]))
            kept.append(smallest[np.diff(table.layout[columns[smallest]], prepend=-1) > 0])
        best = np.unique(np.concatenate(kept))
        return _Step(sums[best], columns[best], labels[best], peak[best])


def _columns(steps: Sequence[_Step], label: int) -> list[int]:
    """Return the columns of the layers that lead to a label of the last of `steps`, which begin before any layer."""
    columns = list[int]()
    for step in reversed(steps[1:]):
        columns.append(int(step.columns[label]))
        label = int(step.parents[label])
    return columns[::-1]
