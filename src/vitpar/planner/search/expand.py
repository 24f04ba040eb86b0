"""The plans of one kind, most promising first: how its stages can be run, and how blocks are dealt to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vitpar.planner.cost.price import Price
from vitpar.planner.profile.model import LayerKind
from vitpar.planner.search.bounds import Kind, Machine, in_flight
from vitpar.planner.search.options import Option
from vitpar.strategy import SCHEDULES, Plan, Strategy


@dataclass(frozen=True)
class Effort:
    """Where a search stops looking. tolerance: what could be better by less than this part of the best is left. kinds:
    looked at in detail at most. prices: of a kind at most. runs: ways to run a stage that are kept at most, by stage
    and number of blocks. alternatives: plans to remember besides the best."""

    tolerance: float = 1e-3
    kinds: int = 60
    prices: int = 40
    runs: int = 12
    alternatives: int = 10


class Best:
    """The best plans so far. limit: seconds an image from which on nothing is better by more than the tolerance. plain:
    the best with one strategy for all layers."""

    def __init__(self, effort: Effort) -> None:
        self.plans: list[Price] = []
        self.plain: Price | None = None
        self._most, self._tolerance = 1 + effort.alternatives, effort.tolerance

    @property
    def limit(self) -> float:
        return (1 - self._tolerance) / self.plans[0].images_per_second if self.plans else math.inf

    def offer(self, found: Price) -> None:
        """A plan that fits."""
        if len(found.plan.kinds) == 1 and (not self.plain or found.images_per_second > self.plain.images_per_second):
            self.plain = found
        if any(found.plan == other.plan and found.batch_size == other.batch_size for other in self.plans):
            return
        self.plans.append(found)
        self.plans.sort(key=lambda p: -p.images_per_second)
        del self.plans[self._most :]

    @property
    def ranked(self) -> tuple[Price, ...]:
        """The best first; of those as good but for the tolerance the simplest: one strategy, few micro-batches."""
        if not self.plans:
            return ()
        enough = (1 - self._tolerance) * self.plans[0].images_per_second
        every = [*self.plans, *((self.plain,) if self.plain and all(p is not self.plain for p in self.plans) else ())]
        alike = [found for found in every if found.images_per_second >= enough]
        first = min(alike, key=lambda p: (len(p.plan.kinds), p.plan.microbatches or 1))
        return first, *(found for found in every if found is not first)


@dataclass(frozen=True)
class _Run:
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


LIMITED = (0, 1, 3, 4)
"""Of what `_Parts` adds up: seconds of a rank and of the background, bytes at two times."""


@dataclass(frozen=True)
class _Parts:
    """What an option takes in a stage, as `Expansion._sum` adds it up: each block, and the stem and the head where
    they are in the stage."""

    option: Option
    block: tuple[float, ...]
    start: tuple[float, ...]
    end: tuple[float, ...]


def _pairs(parts: Sequence[_Parts], blocks: int, most: Sequence[float], mixed: bool) -> Iterator[tuple[_Parts, _Parts]]:
    """Options for the first blocks of a stage and for the rest, the same one unless `mixed`, that may stay within
    `most`."""
    if not mixed:
        yield from ((one, one) for one in parts)
        return
    # With the least of everything around it, one block of an option must fit.
    least = [min(p.block[n] for p in parts) for n in range(5)]
    start, end = ([min(getattr(p, name)[n] for p in parts) for n in range(5)] for name in ("start", "end"))
    fitting = [
        all(p.start[n] + end[n] + p.block[n] + (blocks - 1) * least[n] <= most[n] * (1 + 1e-9) for n in LIMITED)
        for p in parts
    ]
    others = [
        p
        for p in parts
        if all(start[n] + p.end[n] + p.block[n] + (blocks - 1) * least[n] <= most[n] * (1 + 1e-9) for n in LIMITED)
    ]
    for one, fits in zip(parts, fitting, strict=True):
        if fits:
            yield from ((one, other) for other in others if other is not one)


class Expansion:
    """The plans of one kind, most promising first.

    options: strategies of layers. depth: blocks of the model. price: of a plan and a batch size. budget: bytes of a
    rank. found: gets the plans.
    """

    def __init__(
        self,
        kind: Kind,
        options: Sequence[Option],
        machine: Machine,
        depth: int,
        price: Callable[[Plan, int], Price],
        budget: float,
        found: Best,
        effort: Effort,
    ) -> None:
        self._kind, self._options, self._machine, self._depth = kind, options, machine, depth
        self._price, self._budget, self._found, self._most = price, budget, found, effort.runs
        self._alive = in_flight(kind.pipeline, kind.microbatches)
        self._left = effort.prices
        self._shares: dict[int, list[_Parts]] = {}
        self._runs: dict[tuple[int, int], list[_Run]] = {}
        self._cut = False

    def run(self) -> bool:
        """Offer what is better. False if the effort ended before the kind did."""
        pipeline, depth = self._kind.pipeline, self._depth
        if pipeline.virtual_stages > 1:
            for run in self._sorted(self._uniform()):
                self._try([run], "even")
        elif pipeline.pipeline_degree == 1:
            for mixed in (False, True):  # what is simple first: it keeps most mixtures from being looked at
                for run in self._sorted(self._stage(0, depth, mixed)):
                    if run.time >= self._limit or self._left <= 0:
                        break
                    self._try([run])
        else:
            self._deal(0, depth, 0.0, 0.0, [])
        return not self._cut and self._left > 0

    @property
    def _limit(self) -> float:
        """Seconds of a step that would be as good as the best."""
        return self._found.limit * self._kind.batch_size

    def _try(self, runs: list[_Run], split: str | None = None) -> None:
        """Price the plan of these stages."""
        if self._left <= 0 or max(run.time for run in runs) >= self._limit:
            return
        start = 0
        groups: list[tuple[str, Strategy]] = []
        for run in runs:
            groups += run.groups(start)
            start += run.blocks
        strategies = {strategy for _, strategy in groups}
        layers = (("*", groups[0][1]),) if len(strategies) == 1 else tuple(groups)
        plan = replace(
            self._kind.pipeline,
            layers=layers,
            microbatches=self._kind.microbatches,
            split=split or ("even" if len(runs) == 1 else tuple(run.blocks for run in runs)),
        )
        self._left -= 1
        found = self._price(plan, self._kind.batch_size)
        if found.memory_bytes <= self._budget:
            self._found.offer(found)

    def _uniform(self) -> Iterator[_Run]:
        """All blocks under one strategy."""
        pp, depth = self._kind.pipeline.pipeline_degree, self._depth
        for option in self._options:
            own, _, _, _, _ = self._sum([(option, "stem", 1), (option, "block", depth), (option, "head", 1)], 0)
            yield _Run(depth, depth, (option, option), own / pp, 0.0)

    def _stage(self, number: int, blocks: int, mixed: bool) -> Iterator[_Run]:
        """Every way to run `blocks` blocks as stage `number` that may fit into memory and be better. mixed: under two
        strategies."""
        more = self._kind.microbatches * self._machine.overhead
        most = (self._limit - more, self._limit - more, math.inf, self._machine.budget, self._machine.budget)
        parts = self._parts(number)
        for one, other in _pairs(parts, blocks, most, mixed):
            a, b = one.block, other.block
            ends = [x + y for x, y in zip(one.start, other.end, strict=True)]
            low, high = (1, blocks - 1) if mixed else (blocks, blocks)
            for which in LIMITED:
                low, high = _below(low, high, ends[which] + blocks * b[which], a[which] - b[which], most[which])
            for first in range(low, high + 1):
                rest = blocks - first
                own, sent, each = (ends[n] + first * a[n] + rest * b[n] for n in range(3))
                yield _Run(blocks, first, (one.option, other.option), max(own, sent) + more, each)

    def _parts(self, number: int) -> list[_Parts]:
        """What every option takes in a stage."""
        if number not in self._shares:
            starts, ends = number == 0, number == self._kind.pipeline.num_stages - 1
            self._shares[number] = [
                _Parts(
                    option,
                    self._sum([(option, "block", 1)], number),
                    self._sum([(option, "stem", int(starts))], number),
                    self._sum([(option, "head", int(ends))], number),
                )
                for option in self._options
            ]
        return self._shares[number]

    def _sum(self, layers: list[tuple[Option, LayerKind, int]], number: int) -> tuple[float, ...]:
        """Of so many layers in stage `number`: seconds of the rank and of the background in a step, seconds of a
        micro-batch, bytes when the optimizer steps and when the last backward begins."""
        m, alive = self._kind.microbatches, self._alive[number]
        waiting = m > (1 if self._kind.pipeline.pipeline_degree == 1 else alive)
        own = sent = each = resting = busy = 0.0
        for option, kind, times in layers:
            load = option.loads[kind]
            work = self._machine.work(load) / self._machine.speed
            own += times * (m * work + load.once + load.edge)
            sent += times * (m * load.sent_each + load.sent_once)
            each += times * work
            resting += times * (load.kept + load.reduced)
            busy += times * (load.kept + load.gathered + load.gradients * waiting + alive * load.saved)
        return own, sent, each, resting, busy

    def _sorted(self, runs: Iterator[_Run]) -> list[_Run]:
        return sorted((run for run in runs if run.time < self._limit), key=lambda run: run.time)

    def _ways(self, number: int, blocks: int) -> list[_Run]:
        """The quickest ways to run a stage."""
        key = number, blocks
        if key not in self._runs:
            every = sorted(
                (run for mixed in (False, True) for run in self._stage(number, blocks, mixed)), key=lambda run: run.time
            )
            self._runs[key] = every[: self._most]
            self._cut |= len(every) > self._most
        return self._runs[key]

    def _deal(self, number: int, left: int, before: float, longest: float, runs: list[_Run]) -> None:
        """Give stage `number` and those behind it the `left` blocks. before: seconds in which the stages before it work
        on one micro-batch. longest: seconds of a step so far."""
        stages = self._kind.pipeline.num_stages
        if number == stages:
            self._try(runs)
            return
        travels = not SCHEDULES[self._kind.pipeline.schedule].splits_backward
        behind = stages - number - 1
        even = left / (behind + 1)
        sizes = [left] if not behind else range(1, left - behind + 1)
        for blocks in sorted(sizes, key=lambda n: abs(n - even)):
            for run in self._ways(number, blocks):
                here = max(longest, before + run.time)
                if here >= self._limit or self._left <= 0:
                    break
                self._deal(number + 1, left - blocks, before + run.each * travels, here, [*runs, run])


def _below(low: int, high: int, at_none: float, each: float, most: float) -> tuple[int, int]:
    """Of the numbers from `low` to `high`, the range of those n with at_none + each * n <= most."""
    if low > high or at_none + each * low <= most >= at_none + each * high:
        return low, high
    if each == 0:
        return 1, 0
    turn = (most - at_none) / each
    # A number too many on the safe side: what is rounded here is computed again by whoever uses it.
    return (low, min(high, math.floor(turn + 1e-9))) if each > 0 else (max(low, math.ceil(turn - 1e-9)), high)
