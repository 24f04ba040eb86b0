"""Ways to run a pipeline stage: its first blocks under one strategy, the rest under another, the quickest first."""

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
    """The blocks of a stage: `first` of them under one option, the rest under another. time: seconds of a step for a
    rank, at least. through: of these, those between which the stages before it have to work on a micro-batch. each:
    seconds of one micro-batch."""

    blocks: int
    first: int
    options: tuple[Option, Option]
    time: float
    through: float
    each: float

    def groups(self, start: int) -> list[tuple[str, Strategy]]:
        """Selectors and strategies, for blocks from `start` on."""
        one, other = self.options
        spans = ((start, self.first, one), (start + self.first, self.blocks - self.first, other))
        return [(f"{at}-{at + size - 1}", option.strategy) for at, size, option in spans if size]


@dataclass(frozen=True)
class SearchLimits:
    """seconds: of a step, from which on a way is no better. overhead: of these, besides layers. memory: bytes."""

    seconds: float
    overhead: float
    memory: float


class Ways:
    """The ways to run one stage: `block`, `start` and `end` are what `stage_sums` gives for `options`."""

    def __init__(self, options: Sequence[Option], block: Array, start: Array, end: Array) -> None:
        self._options, self._block, self._start, self._end = options, block, start, end

    def quickest(self, blocks: int, limits: SearchLimits, most: int, mixed: bool) -> tuple[list[BlockRun], bool]:
        """Those of `blocks` blocks within `limits`, `most` at most, and whether there are more. mixed: under two
        options."""
        layer_seconds = limits.seconds - limits.overhead
        bounds = np.array([layer_seconds] * 5 + [limits.memory] * 2)
        found: list[tuple[float, int, BlockRun]] = []  # the slowest first
        number = 0
        for least, one, other, low, high in self._pairs(blocks, bounds) if mixed else self._alone(blocks, bounds):
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
        """One option for all blocks."""
        totals = self._start + self._end + blocks * self._block
        least = totals[TIMES].max(0)
        (fits,) = np.nonzero((totals[LIMITED] <= bounds[:, None]).all(0))
        for one in fits[least[fits].argsort(kind="stable")].tolist():
            yield float(least[one]), one, one, blocks, blocks

    def _pairs(self, blocks: int, bounds: Array) -> Iterator[tuple[float, int, int, int, int]]:
        """(seconds at least, options, fewest and most blocks of the first that may stay within `bounds`), the quickest
        first. All grow or fall steadily with the blocks of the first option."""
        if blocks < 2:
            return
        block, start, end = self._block[LIMITED], self._start[LIMITED], self._end[LIMITED]
        none = start[:, :, None] + end[:, None, :] + blocks * block[:, None, :]
        slope = block[:, :, None] - block[:, None, :]
        bounds = bounds[:, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            turn = (bounds - none) / slope
        inside = (none + slope <= bounds) & (none + (blocks - 1) * slope <= bounds)
        # A number too many on the safe side: what is rounded here is computed again.
        low = np.where(inside | (slope >= 0), 1.0, np.ceil(turn - 1e-9)).clip(min=1).max(0)
        high = np.where(inside | (slope <= 0), blocks - 1.0, np.floor(turn + 1e-9)).clip(max=blocks - 1).min(0)
        possible = (low <= high) & ~(~inside & (slope == 0)).any(0)
        np.fill_diagonal(possible, False)
        with np.errstate(invalid="ignore"):
            ends = np.minimum(none[TIMES] + low * slope[TIMES], none[TIMES] + high * slope[TIMES]).max(0)
        ones, others = possible.nonzero()
        least, lows, highs = (table[ones, others] for table in (ends, low, high))
        order = least.argsort(kind="stable")
        columns = (least, ones, others, lows.astype(int), highs.astype(int))
        yield from zip(*(column[order].tolist() for column in columns), strict=True)

    def _run(self, one: int, other: int, blocks: int, first: int, overhead: float) -> BlockRun:
        b = self._block
        sums = self._start[:, one] + self._end[:, other] + first * b[:, one] + (blocks - first) * b[:, other]
        options = self._options[one], self._options[other]
        through = float(sums[0]) + overhead
        return BlockRun(blocks, first, options, float(sums[TIMES].max()) + overhead, through, float(sums[EACH]))

    @staticmethod
    def _sorted(found: list[tuple[float, int, BlockRun]]) -> list[BlockRun]:
        return [run for _, _, run in sorted(found, reverse=True)]
