"""Costs of the layers of a model, by layer and strategy, for plans of one outline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vitpar.planner.search.bounds import EACH, ROWS, LayerSums, Machine, PlanOutline, layer_sums, rounds
from vitpar.planner.search.loads import Array, Indices
from vitpar.planner.search.options import Choices
from vitpar.planner.search.sections import Sections
from vitpar.strategy import Strategy
from vitpar.strategy.layout import Layout, token_layout_key

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
        keys = [token_layout_key(strategy) for (strategy,) in choices.strategies]
        layouts = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self.layout = np.array([layouts[key] for key in keys])  # of each column
        self._models = tuple(choices.strategies[keys.index(key)][0] for key in layouts)
        self._moved: dict[int, Array] = {}
        # Redistribution blocks in forward and backward of every micro-batch; no transfer in the background adds to it.
        self.waits = np.zeros(ROWS)
        self.waits[:4], self.waits[EACH] = outline.microbatches, 1.0
        if outline.pipeline.pipeline_degree == 1:
            self.waits[4] = outline.microbatches
        self.scale = np.ones(len(keys))
        """Factors of the seconds of each column."""
        self.hops = np.array(machine.hops(float(choices.token_share.min())).each)
        """Seconds of a message between neighbouring stages."""
        self.queued = 2 * self.hops * (rounds(outline) if outline.pipeline.schedule == "1f1b" else 0)
        """Seconds in a step that 1f1b waits for these messages."""
        self.action = 2 * machine.action
        """Seconds of a micro-batch outside layers, on each stage."""
        each = machine.overhead if outline.pipeline.pipeline_degree == 1 else 2 * machine.action
        self._message = outline.microbatches * machine.tokens * choices.token_share
        self.images = machine.images * choices.image_share
        """Bytes of a batch's images, by column."""
        self.overhead = outline.microbatches * each + machine.norm
        """Seconds of a step outside layers."""

    def sums(self, number: int) -> LayerSums:
        """Return the costs of single layers in stage `number`, cached."""
        if number not in self._sums:
            sums = self._sums[number] = layer_sums(self.outline, self.choices.loads, self.machine, number)
            sums.layers[: EACH + 1] *= self.scale
        return self._sums[number]

    def sent(self, layer: int) -> Array:
        """Return the bytes of a step's messages in front of a layer, for which torch keeps buffers, by column."""
        takes = self.sections.takes
        return takes[layer - 1] / min(takes[:-1]) * self._message

    def moved(self, layer: int) -> Array:
        """Return the seconds per micro-batch of redistribution in front of a layer, [layout before, layout behind].

        layer: 1 for the first block, to the number of blocks + 1 for the head
        """
        elements = self.sections.takes[layer - 1]
        if elements not in self._moved:
            self._moved[elements] = self._moves(elements, self._models)
        return self._moved[elements]

    def edges(self, layer: int, before: Indices, behind: Indices) -> Array:
        """Return the seconds per micro-batch of redistribution in front of a layer, [before, behind]."""
        return self.moved(layer)[self.layout[before][:, None], self.layout[behind]]


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
