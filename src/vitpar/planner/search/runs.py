"""Ways to run a pipeline stage: its first blocks under one strategy, the rest under another, fastest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitpar.planner.search.bounds import EACH, LIMITED, TIMES
from vitpar.planner.search.options import Array, Option
from vitpar.strategy import Strategy


@dataclass(frozen=True)
class BlockRun:
    """A way to run the blocks of a stage, with lower bounds on its time."""

    blocks: int
    """Number of blocks of the stage."""
    first: int
    """Number of blocks, from the first on, with the first of `options`; the others have the second."""
    options: tuple[Option, Option]
    """The two strategies, equal if there is only one."""
    time: float
    """Least seconds of a step."""
    through: float
    """Least seconds from the stage's first micro-batch to its last, to which earlier stages' time can be added (row 0
    of `stage_sums`)."""
    each: float
    """Least seconds of one micro-batch, forward and backward."""

    def groups(self, start: int) -> list[tuple[str, Strategy]]:
        """Return (selector, strategy) pairs, if the stage's first block is block `start` of the model."""
        one, other = self.options
        spans = ((start, self.first, one), (start + self.first, self.blocks - self.first, other))
        return [(f"{at}-{at + size - 1}", option.strategy) for at, size, option in spans if size]


@dataclass(frozen=True)
class SearchLimits:
    """Limits that a way to run a stage has to meet."""

    seconds: float
    """Seconds of a step that it has to stay below."""
    overhead: float
    """Seconds of a step outside layers, a part of `seconds`."""
    memory: float
    """Bytes of a rank."""


class Ways:
    """The ways to run one stage.

    options: strategies to choose from
    block, start, end: arrays of `stage_sums`, with a column for each of `options`
    """

    def __init__(self, options: Sequence[Option], block: Array, start: Array, end: Array) -> None:
        self._options, self._block, self._start, self._end = options, block, start, end

    def quickest(self, blocks: int, limits: SearchLimits, most: int, mixed: bool) -> tuple[list[BlockRun], bool]:
        """Return (the fastest ways within `limits`, fastest first, whether there are more).

        blocks: number of blocks of the stage
        most: maximum number of ways to return
        mixed: whether the ways have two different strategies; otherwise one
        """
        layer_seconds = limits.seconds - limits.overhead
        bounds = np.array([layer_seconds] * 5 + [limits.memory] * 2)  # in the order of `LIMITED`
        found: list[tuple[float, int, BlockRun]] = []  # heap of (-time, -number, way): the slowest is at the top
        number = 0
        for least, one, other, low, high in self._pairs(blocks, bounds) if mixed else self._alone(blocks, bounds):
            # Pairs come in the order of their least time: no later one is faster than the slowest kept one.
            if len(found) >= most and least + limits.overhead > -found[0][0]:
                return self._sorted(found), True
            for first in range(low, high + 1):
                run = self._run(one, other, blocks, first, limits.overhead)
                if run.time < limits.seconds:
                    number += 1
                    heapq.heappush(found, (-run.time, -number, run))
                    if len(found) > most:
                        heapq.heappop(found)
        return self._sorted(found), number > most

    def _alone(self, blocks: int, bounds: Array) -> Iterator[tuple[float, int, int, int, int]]:
        """Yield what `_pairs` does, for one strategy for all blocks: both are the same, and all blocks are "first"."""
        totals = self._start + self._end + blocks * self._block
        least = totals[TIMES].max(0)
        (fits,) = np.nonzero((totals[LIMITED] <= bounds[:, None]).all(0))
        for one in fits[least[fits].argsort(kind="stable")].tolist():
            yield float(least[one]), one, one, blocks, blocks

    def _pairs(self, blocks: int, bounds: Array) -> Iterator[tuple[float, int, int, int, int]]:
        """Yield (least seconds, first strategy, second strategy, fewest and most blocks of the first), fastest first.

        Strategies are indices. Outside of the range of blocks, the pair exceeds `bounds`, limits in the order of
        `LIMITED`. Every sum is linear in the number of blocks with the first strategy, so each limit cuts off a range.
        """
        if blocks < 2:
            return
        block, start, end = self._block[LIMITED], self._start[LIMITED], self._end[LIMITED]
        # Sums with no block under the first strategy, [limits, first strategy, second strategy], and their change for
        # each block that moves to it. The stage begins with the first strategy, so `start` is the first one's.
        none = start[:, :, None] + end[:, None, :] + blocks * block[:, None, :]
        slope = block[:, :, None] - block[:, None, :]
        bounds = bounds[:, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            turn = (bounds - none) / slope
        inside = (none + slope <= bounds) & (none + (blocks - 1) * slope <= bounds)
        # Rounding may include a number of blocks just outside of a limit; `quickest` computes the time again.
        low = np.where(inside | (slope >= 0), 1.0, np.ceil(turn - 1e-9)).clip(min=1).max(0)
        high = np.where(inside | (slope <= 0), blocks - 1.0, np.floor(turn + 1e-9)).clip(max=blocks - 1).min(0)
        possible = (low <= high) & ~(~inside & (slope == 0)).any(0)
        np.fill_diagonal(possible, False)
        with np.errstate(invalid="ignore"):
            ends = np.minimum(none[TIMES] + low * slope[TIMES], none[TIMES] + high * slope[TIMES]).max(0)
        # `ends`: each sum is smallest at one end of its range, so the largest of these minima bounds the pair's time.
        ones, others = possible.nonzero()
        least, lows, highs = (table[ones, others] for table in (ends, low, high))
        order = least.argsort(kind="stable")
        columns = (least, ones, others, lows.astype(int), highs.astype(int))
        yield from zip(*(column[order].tolist() for column in columns), strict=True)

    def _run(self, one: int, other: int, blocks: int, first: int, overhead: float) -> BlockRun:
        """Return the way with `first` blocks under strategy `one` and the rest under `other`."""
        b = self._block
        sums = self._start[:, one] + self._end[:, other] + first * b[:, one] + (blocks - first) * b[:, other]
        options = self._options[one], self._options[other]
        through = float(sums[0]) + overhead
        return BlockRun(blocks, first, options, float(sums[TIMES].max()) + overhead, through, float(sums[EACH]))

    @staticmethod
    def _sorted(found: list[tuple[float, int, BlockRun]]) -> list[BlockRun]:
        return [run for _, _, run in sorted(found, reverse=True)]
