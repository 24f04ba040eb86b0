"""Ways to run a pipeline stage: its first blocks under one strategy, the rest under another, the quickest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitpar.planner.search.options import Option
from vitpar.strategy import Strategy

OWN, SENT, EACH, RESTING, BUSY = range(5)
"""What layers add up to in a stage: seconds of the rank and of the background in a step, seconds of a micro-batch,
bytes when the optimizer steps and when the last backward begins."""
LIMITED = (OWN, SENT, RESTING, BUSY)


@dataclass(frozen=True)
class Parts:
    """What an option takes in a stage: each block, and the stem and the head where they are in the stage."""

    option: Option
    block: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]


@dataclass(frozen=True)
class Run:
    """The blocks of a stage: `first` of them under one option, the rest under another. time: seconds of a step for a
    rank, at least. each: of one micro-batch."""

    blocks: int
    first: int
    options: tuple[Option, Option]
    time: float
    each: float

    def groups(self, start: int) -> list[tuple[str, Strategy]]:
        """Selectors and strategies, for blocks from `start` on."""
        one, other = self.options
        spans = ((start, self.first, one), (start + self.first, self.blocks - self.first, other))
        return [(f"{at}-{at + size - 1}", option.strategy) for at, size, option in spans if size]


@dataclass(frozen=True)
class Limits:
    """seconds: of a step, from which on a way is no better. overhead: of these, besides layers. memory: bytes."""

    seconds: float
    overhead: float
    memory: float


class Ways:
    """The ways to run one stage with the options that `parts` has."""

    def __init__(self, parts: Sequence[Parts]) -> None:
        self._parts = parts
        self._block, self._start, self._end = (
            torch.tensor([[getattr(p, name)[n] for p in parts] for n in LIMITED], dtype=torch.float64).reshape(4, -1)
            for name in ("block", "start", "end")
        )

    def quickest(self, blocks: int, limits: Limits, most: int, mixed: bool) -> tuple[list[Run], bool]:
        """Those of `blocks` blocks within `limits`, `most` at most, and whether there are more. mixed: under two
        options."""
        layer_seconds = limits.seconds - limits.overhead
        bounds = torch.tensor([layer_seconds, layer_seconds, limits.memory, limits.memory], dtype=torch.float64)
        found: list[tuple[float, int, Run]] = []  # the slowest first
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

    def _alone(self, blocks: int, bounds: Tensor) -> Iterator[tuple[float, int, int, int, int]]:
        """One option for all blocks."""
        totals = self._start + self._end + blocks * self._block
        least = totals[:2].amax(0)
        fits = (totals <= bounds[:, None]).all(0).nonzero()[:, 0]
        for one in fits[least[fits].argsort(stable=True)].tolist():
            yield float(least[one]), one, one, blocks, blocks

    def _pairs(self, blocks: int, bounds: Tensor) -> Iterator[tuple[float, int, int, int, int]]:
        """(seconds at least, options, fewest and most blocks of the first that may stay within `bounds`), the quickest
        first. All grow or fall steadily with the blocks of the first option."""
        if blocks < 2:
            return
        none = self._start[:, :, None] + self._end[:, None, :] + blocks * self._block[:, None, :]
        slope = self._block[:, :, None] - self._block[:, None, :]
        bounds = bounds[:, None, None]
        turn = (bounds - none) / slope
        inside = (none + slope <= bounds) & (none + (blocks - 1) * slope <= bounds)
        # A number too many on the safe side: what is rounded here is computed again.
        low = torch.where(inside | (slope >= 0), 1.0, (turn - 1e-9).ceil()).clamp(min=1).amax(0)
        high = torch.where(inside | (slope <= 0), blocks - 1.0, (turn + 1e-9).floor()).clamp(max=blocks - 1).amin(0)
        possible = (low <= high) & ~(~inside & (slope == 0)).any(0)
        possible.fill_diagonal_(False)
        ends = torch.minimum(none[:2] + low * slope[:2], none[:2] + high * slope[:2]).amax(0)
        ones, others = possible.nonzero(as_tuple=True)
        least, lows, highs = (table[ones, others] for table in (ends, low, high))
        order = least.argsort(stable=True)
        columns = (least, ones, others, lows.long(), highs.long())
        yield from zip(*(column[order].tolist() for column in columns), strict=True)

    def _run(self, one: int, other: int, blocks: int, first: int, overhead: float) -> Run:
        a, b = self._parts[one], self._parts[other]
        own, sent, each = (
            a.start[n] + b.end[n] + first * a.block[n] + (blocks - first) * b.block[n] for n in (OWN, SENT, EACH)
        )
        return Run(blocks, first, (a.option, b.option), max(own, sent) + overhead, each)

    @staticmethod
    def _sorted(found: list[tuple[float, int, Run]]) -> list[Run]:
        return [run for _, _, run in sorted(found, reverse=True)]
