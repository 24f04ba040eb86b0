"""Enumeration of all plans of one outline, without those that bounds rule out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from vitpar.planner.search.bounds import BYTES, EACH, LIMITED, TIMES
from vitpar.planner.search.mixes import Runs
from vitpar.planner.search.options import Array
from vitpar.planner.search.tables import LayerTable

Stages = list[tuple[int, Runs]]
"""(number of blocks, strategies) of each stage."""
WEIGHTS = np.array(
    [list(row) for row in np.eye(7)]
    + [
        [t / 8 * (row == at) for at in range(5)] + [(8 - t) / 8 * (1 - last), (8 - t) / 8 * last]
        for t in range(1, 8)
        for last in (0, 1)
        for row in (0, 2, 3)
    ]
    + [[t / 4, *((4 - t) / 4 * (row == at) for at in (1, 2, 3, 4)), 0, 0] for t in range(1, 4) for row in (2, 3, 4)]
)
"""Dual weights that bounds are computed for, [tries, rows of `LIMITED`]; each row sums to 1.

Single limits; a limit of time with one of memory; the computing of a stage with another limit of time.
"""
SLACK = 1e-9
"""Relative tolerance of limits, for rounding."""


class Enumeration:
    """Depth-first search that gives each block a strategy and ends stages, in the order of blocks.

    limits: returns the present limits in the order of `LIMITED`
    give: receives the stages of every plan that remains, with its bound; returns whether to go on
    nodes: number of nodes to visit at most
    late: returns whether the time of the search is up
    """

    def __init__(
        self,
        table: LayerTable,
        hop: float,
        limits: Callable[[], Array],
        give: Callable[[Stages, float], bool],
        nodes: int,
        late: Callable[[], bool],
    ) -> None:
        self._table, self._hop, self._limits, self._give = table, hop, limits, give
        self._nodes, self._late = nodes, late
        self._sections, self._depth = table.sections, table.sections.depth
        self._stages = table.outline.pipeline.num_stages
        self._delays = not table.outline.pipeline.splits_backward
        self._known: Array | None = None
        self._rest = np.zeros((len(WEIGHTS), self._depth + 1))
        self._behind = np.zeros(self._depth + 1)
        self._need = [0] * (self._depth + 1)
        self.complete = True

    def run(self) -> bool:
        """Enumerate the plans. Return whether all were visited or ruled out."""
        self._enter(0, 0, 0.0, 0.0, [])
        return self.complete

    def _bounds(self) -> Array:
        """Return the limits, and update the bounds of the blocks behind each block when they have changed."""
        limits = self._limits()
        if self._known is None or (limits != self._known).any():
            self._known = limits
            layers = self._table.sums(self._stages - 1).layers
            allowed = np.full(layers.shape[1:], np.inf)
            for section, front in zip(self._sections.sections, self._table.choices.fronts, strict=True):
                for kind in section.kinds:
                    allowed[self._sections.kinds.index(kind), front] = 0.0
            with np.errstate(invalid="ignore"):
                shares = layers[LIMITED] / np.maximum(limits, 1e-300)[:, None, None]
            least = (np.tensordot(WEIGHTS, shares, 1) + allowed).min(2)  # [weights, kinds]
            rows = list(self._sections.rows)
            blocks = least[:, rows]
            tail = np.concatenate([blocks[:, ::-1].cumsum(1)[:, ::-1], np.zeros((len(least), 1))], 1)
            self._rest = tail + least[:, -1:]
            through = (layers[0] + allowed).min(1)
            self._behind = np.array([through[rows[block:]].sum() + through[-1] for block in range(self._depth + 1)])
            self._need = [0] * (self._depth + 1)
            for block in range(self._depth - 1, -1, -1):
                within = int((blocks[:, block:].cumsum(1) <= 1 + SLACK).all(0).sum())
                self._need[block] = 1 + self._need[block + within] if within else self._stages + 1
        return limits

    def _enter(self, number: int, block: int, before: float, longest: float, stages: Stages) -> None:
        """Enumerate the rest of a plan from stage `number` on, which begins with `block`.

        before: seconds of one micro-batch in the earlier stages, forward and backward
        longest: lower bound on the seconds of a step by the earlier stages
        stages: the earlier stages
        """
        start = np.zeros(8)
        start[BYTES] += self._table.sums(number).besides
        self._place(number, block, start, -1, False, [], before, longest, stages)

    def _place(
        self,
        number: int,
        block: int,
        sums: Array,
        column: int,
        switched: bool,
        runs: Runs,
        before: float,
        longest: float,
        stages: Stages,
    ) -> None:
        """Enumerate the strategies of `block` and what follows it in stage `number`.

        sums: costs of the stage so far
        column: strategy of the block before; -1 at the beginning of the stage
        switched: whether the section has two strategies in this stage already
        runs: strategies of the stage so far
        """
        self._nodes -= 1
        if self._nodes < 0 or self._late():
            self.complete = False
        if not self.complete:
            return
        section = self._sections.of_block[block]
        fresh = column < 0 or self._sections.of_block[block - 1] != section
        front = self._table.choices.fronts[section]
        columns = np.array([column]) if switched and not fresh else front
        layer_sums, row = self._table.sums(number), self._sections.rows[block]
        next_sums = sums[:, None] + layer_sums.layers[:, row, columns]
        if column < 0 and number == 0:
            next_sums += layer_sums.layers[:, 0, columns]
        if column >= 0:
            next_sums += self._table.waits[:, None] * self._table.edges(block, column, columns)
        for share, place in self._possible(number, block, next_sums, before):
            if not share <= 1 + SLACK:
                continue
            one = int(columns[place])
            mine = runs if one == column else [*runs, (block, one)]
            late = not fresh and (switched or one != column)
            here = next_sums[:, place]
            behind, first = self._stages - 1 - number, mine[0][0]
            leaves = block + 1 == self._depth if behind == 0 else block + 1 < self._depth
            # Each of the later stages needs a block behind the next one.
            stays = block + 1 < self._depth and self._depth - block - 2 >= behind
            # Nearly even splits first: they are usually best, and a good price early rules out others.
            short = block + 1 - first < (self._depth - first) // (behind + 1)
            for leaving in (False, True) if short else (True, False):
                if leaving and leaves:
                    self._leave(number, block, here, one, mine, before, longest, stages)
                elif not leaving and stays:
                    self._place(number, block + 1, here, one, late, mine, before, longest, stages)
            if not self.complete:
                return

    def _possible(self, number: int, block: int, sums: Array, before: float) -> list[tuple[float, int]]:
        """Return (share of the limits that is used at least, place) of each of `sums` [8, places], fastest first."""
        limits = self._bounds()
        if (limits <= 0).any():
            return []
        last = number == self._stages - 1
        shares = WEIGHTS @ (sums[LIMITED] / limits[:, None])
        through = sums[0] + self._delays * before
        if last:
            shares = shares + self._rest[:, [block + 1]]
            through = through + self._behind[block + 1]
        worst = np.maximum(shares.max(0), through / limits[0])
        order = sums[TIMES].max(0).argsort(kind="stable")
        return list(zip(worst[order].tolist(), order.tolist(), strict=True))

    def _leave(
        self,
        number: int,
        block: int,
        sums: Array,
        column: int,
        runs: Runs,
        before: float,
        longest: float,
        stages: Stages,
    ) -> None:
        """End stage `number` after `block`, and enumerate the later stages or give the finished plan."""
        layer_sums, last = self._table.sums(number), number == self._stages - 1
        sums = sums.copy()
        if last:
            sums += layer_sums.layers[:, -1, column]
        sums[-1] += layer_sums.working[self._sections.rows[block], column]
        limits = self._bounds()
        through = float(sums[0]) + self._delays * before
        time = max(float(sums[:5].max()), through, longest)
        if not time <= limits[0] * (1 + SLACK) or (sums[BYTES] > limits[5:]).any():
            return
        done = [*stages, (block + 1 - runs[0][0], runs)]
        if last:
            self.complete &= self._give(done, time)
        elif self._need[block + 1] <= self._stages - number - 1 <= self._depth - block - 1:
            self._enter(number + 1, block + 1, before + float(sums[EACH]) + self._hop, time, done)
