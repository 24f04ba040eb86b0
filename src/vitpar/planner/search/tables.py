"""Costs of the blocks of a model, by block and strategy, for plans of one outline.

A *mix* is one strategy for each section, as columns of `Choices`. Costs of neighbouring blocks under a mix are
differences of prefix sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitpar.planner.search.bounds import BYTES, EACH, TIMES, LayerSums, Machine, PlanOutline, layer_sums
from vitpar.planner.search.options import Array, Choices
from vitpar.planner.search.sections import Sections
from vitpar.strategy import Strategy
from vitpar.strategy.layout import Layout, token_layout_key

Mix = tuple[int, ...]
Moves = Callable[[int, tuple[Strategy, ...]], Array]
"""Function (elements of an activation of an image, strategies) that returns the seconds per micro-batch to redistribute
from each strategy to each, forward and backward."""


class LayerTable:
    """Costs of layers by block and strategy in the rows of `layer_sums`, and of redistribution between blocks."""

    def __init__(
        self, outline: PlanOutline, choices: Choices, sections: Sections, machine: Machine, moves: Moves
    ) -> None:
        self.outline, self.choices, self.sections, self.machine = outline, choices, sections, machine
        self._moves, self._sums = moves, dict[int, LayerSums]()
        keys = [token_layout_key(option.strategy) for option in choices.options]
        layouts = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self.layout = np.array([layouts[key] for key in keys])  # of each column
        self._models = tuple(choices.options[keys.index(key)].strategy for key in layouts)
        self._moved: dict[int, Array] = {}
        # Redistribution blocks in forward and backward of every micro-batch; no transfer in the background adds to it.
        self.waits = np.zeros(8)
        self.waits[:4], self.waits[EACH] = outline.microbatches, 1.0
        if outline.pipeline.pipeline_degree == 1:
            self.waits[4] = outline.microbatches

    def sums(self, number: int) -> LayerSums:
        """Return the costs of single layers in stage `number`, cached."""
        if number not in self._sums:
            self._sums[number] = layer_sums(self.outline, self.choices, self.machine, number)
        return self._sums[number]

    def moved(self, block: int) -> Array:
        """Return the seconds per micro-batch of redistribution in front of a block, [layout before, layout behind]."""
        elements = self.sections.takes[block]
        if elements not in self._moved:
            self._moved[elements] = self._moves(elements, self._models)
        return self._moved[elements]

    def edges(self, block: int, before: int | NDArray[np.int64], behind: NDArray[np.int64]) -> Array:
        """Return the seconds per micro-batch of redistribution in front of a block, from column(s) to columns."""
        return self.moved(block)[self.layout[before], self.layout[behind]]


class MixTable:
    """Costs of every interval of blocks under several mixes.

    mixes: columns of strategies, an array [mixes, sections]
    """

    def __init__(self, table: LayerTable, mixes: NDArray[np.int64]) -> None:
        self.table, self.mixes, sections = table, mixes, table.sections
        self.depth = sections.depth
        self.columns = mixes[:, list(sections.of_block)].T  # [blocks, mixes]
        self._rows = np.array(sections.rows)[:, None]
        moved = [
            table.edges(block, self.columns[block - 1], self.columns[block]) if block else np.zeros(len(mixes))
            for block in range(self.depth)
        ]
        self._moved = np.concatenate([np.zeros((1, len(mixes))), np.cumsum(moved, 0)])  # [blocks + 1, mixes]
        self._prefixes: dict[int, Array] = {}

    def prefixes(self, number: int) -> Array:
        """Return the costs of the blocks before each block in stage `number`, [8, blocks + 1, mixes]."""
        if number not in self._prefixes:
            blocks = self.table.sums(number).layers[:, self._rows, self.columns]
            zero = np.zeros((8, 1, len(self.mixes)))
            self._prefixes[number] = np.concatenate([zero, np.cumsum(blocks, 1)], 1)
        return self._prefixes[number]

    @cached_property
    def inside(self) -> Array:
        """Seconds per micro-batch of redistribution within blocks i to j - 1, [i, j, mixes]."""
        behind = np.concatenate([self._moved[1:], self._moved[-1:]])
        return np.maximum(0.0, self._moved[None, :] - behind[:, None])

    def intervals(self, number: int) -> Array:
        """Return the costs of stage `number` with blocks i to j - 1, [8, i, j, mixes]; infinite for no blocks."""
        prefixes, of_layers = self.prefixes(number), self.table.sums(number)
        sums = prefixes[:, None, :, :] - prefixes[:, :, None, :] + self.table.waits[:, None, None, None] * self.inside
        sums[BYTES] += of_layers.besides
        sums[:, 0] += self.start(number)[:, None, :]
        sums[:, :, -1] += of_layers.layers[:, -1, self.mixes[:, -1]][:, None, :]
        sums[-1, :, 1:] += of_layers.working[self._rows, self.columns]
        sums[:, np.arange(self.depth + 1)[:, None] >= np.arange(self.depth + 1)] = np.inf
        return sums

    def start(self, number: int) -> Array:
        """Return the costs of embed in stage `number`, [8, mixes]."""
        return self.table.sums(number).layers[:, 0, self.mixes[:, 0]]

    def two(self, number: int, first: int, stop: int) -> Array:
        """Return the costs of stage `number` with blocks `first` to `stop` - 1 under two mixes, one after the other.

        An array [8, blocks under the first mix - 1, first mix, second mix].
        """
        prefixes, of_layers = self.prefixes(number), self.table.sums(number)
        middles = np.arange(first + 1, stop)
        head = prefixes[:, middles] - prefixes[:, [first]]
        head += self.table.waits[:, None, None] * self.inside[first, middles]
        tail = prefixes[:, [stop]] - prefixes[:, middles]
        tail += self.table.waits[:, None, None] * self.inside[middles, stop]
        if first == 0:
            head += self.start(number)[:, None]
        if stop == self.depth:
            tail += of_layers.layers[:, -1, self.mixes[:, -1]][:, None]
        tail[-1] += of_layers.working[self._rows[stop - 1], self.columns[stop - 1]]
        sums = head[:, :, :, None] + tail[:, :, None, :]
        sums[BYTES] += of_layers.besides
        moved = np.stack(
            [self.table.edges(k, self.columns[k - 1][:, None], self.columns[k][None, :]) for k in middles.tolist()]
        )
        sums += self.table.waits[:, None, None, None] * moved
        return sums


def seconds_of(sums: Array) -> Array:
    """Return the least seconds of a stage from the rows of `layer_sums`."""
    seconds: Array = sums[TIMES].max(0)
    return seconds


def received_shares(layouts: Sequence[Layout]) -> Array:
    """Return `vitpar.strategy.layout.received_share` from each of `layouts` to each, [source, target]."""
    # Begin and end of each rank's part as shares of all rows and features, [layouts, ranks].
    parts = [np.array([(p.row, p.rows, p.feature, p.features) for p in layout], dtype=float) for layout in layouts]
    row, rows, feature, features = np.moveaxis(np.array(parts), 2, 0)
    spans = ((row / rows, (row + 1) / rows), (feature / features, (feature + 1) / features))
    shares = np.zeros((len(layouts), len(layouts)))
    for source in range(len(layouts)):
        kept = np.ones_like(row)
        for begin, end in spans:
            kept *= np.maximum(0.0, np.minimum(end[source], end) - np.maximum(begin[source], begin))
        shares[source] = (1 / (rows * features) - kept).max(1)
        shares[source, source] = 0.0
    return np.where(shares > 1e-12, shares, 0.0)
