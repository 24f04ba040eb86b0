"""The search: the most promising kind of plan first, until nothing left can be better than what was found.

Every kind has a bound that holds for any mix of strategies (`bounds`). Within a kind the plans of `space` are taken in
the order of bounds of their own, and only those are priced whose bound is below the best price so far. So what is found
is the best of the space, unless `Effort` cut a kind short; then `Result.exact` says so, and `Result.bound` still holds.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, crowded, price
from vitpar.planner.profile.model import LayerKind
from vitpar.planner.search.bounds import Kind, Machine, in_flight, least_seconds
from vitpar.planner.search.options import Option, Options
from vitpar.planner.search.space import Space
from vitpar.strategy import SCHEDULES, Plan, Strategy

Progress = Callable[[int, int, Price | None], None]
"""Called with (kinds done, kinds in all, the best so far)."""


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


@dataclass(frozen=True)
class Result:
    """What a search found.

    plans: the best first, then the next best. bound: images a second that no plan with any mix of strategies exceeds.
    exact: whether the first is the best of the whole space. kinds: pipelines with micro-batches. priced: plans.
    strategies: different ones of a layer. seconds: that the search took. Nothing fits where there are no plans.
    """

    plans: tuple[Price, ...]
    bound: float
    exact: bool
    kinds: int
    priced: int
    strategies: int
    seconds: float


class Search:
    """Searches `space` for one model on one machine; profiles are looked up once for all budgets.

    moments: bytes that the optimizer keeps for every byte of parameters.
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float = 2, effort: Effort = Effort()) -> None:
        self.space, self.effort = space, effort
        self._costs, self._moments = costs, moments
        self._options = Options(space, costs, moments)
        self._prices: dict[tuple[Plan, int], Price] = {}

    def best(
        self, budget: float, progress: Progress = lambda done, total, best: None, effort: Effort | None = None
    ) -> Result:
        """The plans with the most images a second whose ranks need no more than `budget` bytes."""
        effort = effort or self.effort
        begun, order = time.perf_counter(), count()
        heap: list[tuple[float, int, bool, Kind]] = []
        for kind in self._kinds():
            bound = self._bound(kind, budget, quick=True)
            if bound < math.inf:
                heapq.heappush(heap, (bound, next(order), False, kind))
        total, found, exact, least, looked = len(heap), _Best(effort), True, math.inf, 0
        while heap:
            bound, _, sharp, kind = heapq.heappop(heap)
            if bound >= found.limit:
                least = min(least, bound)
                break
            if not sharp:
                bound = self._bound(kind, budget, quick=False)
                if bound < math.inf:
                    heapq.heappush(heap, (bound, next(order), True, kind))
                continue
            least = min(least, bound)
            looked += 1
            if looked > effort.kinds and found.plans:
                exact = False
                break
            progress(total - len(heap), total, found.plans[0] if found.plans else None)
            exact &= _Expansion(self, kind, budget, found, effort).run()
        seconds = time.perf_counter() - begun
        return Result(
            plans=tuple(found.plans),
            bound=1 / least if least < math.inf else 0.0,
            exact=exact,
            kinds=total,
            priced=len(self._prices),
            strategies=self._options.strategies,
            seconds=seconds,
        )

    def frontier(self, best: Price, points: int = 6, step: float = 0.7) -> tuple[Price, ...]:
        """The best plans for less and less memory, `best` first: each for `step` of what the one before needs, and
        found with less effort."""
        found, rough = [best], replace(self.effort, tolerance=0.01, kinds=6, prices=8, runs=4)
        while len(found) < points:
            plans = self.best(step * found[-1].memory_bytes, effort=rough).plans
            if not plans:
                break
            found.append(plans[0])
        return tuple(found)

    def price(self, plan: Plan, batch_size: int) -> Price:
        """Of a validated plan, remembered."""
        key = plan, batch_size
        if key not in self._prices:
            self._prices[key] = price(plan, self._costs, batch_size, self._moments)
        return self._prices[key]

    def _kinds(self) -> Iterator[Kind]:
        for batch_size in self.space.batch_sizes:
            for pipeline in self.space.pipelines():
                for microbatches in self.space.microbatches(pipeline, batch_size):
                    yield Kind(pipeline, batch_size, microbatches)

    def options(self, kind: Kind) -> list[Option]:
        """The strategies worth looking at in plans of a kind."""
        return self._options.of(kind.pipeline, kind.rows)

    def machine(self, kind: Kind, budget: float) -> Machine:
        """What a rank of a kind has."""
        pp = kind.pipeline.pipeline_degree
        size, at_once = self.space.ranks // pp, self._costs.at_once(self.space.ranks // pp)
        return Machine(
            alone=self._costs.crowd(1),
            sending=crowded(at_once, pp),
            speed=min(1.0, at_once),
            lanes=min(at_once, pp),
            overhead=self._costs.model.microbatch
            * max(self._costs.crowd(size), self._costs.crowd(1) * kind.pipeline.num_stages / min(at_once, pp)),
            budget=budget,
        )

    def _bound(self, kind: Kind, budget: float, quick: bool) -> float:
        """Seconds an image."""
        machine, depth = self.machine(kind, budget), self.space.config.depth
        return least_seconds(kind, self.options(kind), depth, machine, quick=quick) / kind.batch_size

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return self.space.config.depth


class _Best:
    """The best plans so far. limit: seconds an image from which on nothing is better by more than the tolerance."""

    def __init__(self, effort: Effort) -> None:
        self.plans: list[Price] = []
        self._most, self._tolerance = 1 + effort.alternatives, effort.tolerance

    @property
    def limit(self) -> float:
        return (1 - self._tolerance) / self.plans[0].images_per_second if self.plans else math.inf

    def offer(self, found: Price) -> None:
        """A plan that fits."""
        if any(found.plan == other.plan and found.batch_size == other.batch_size for other in self.plans):
            return
        self.plans.append(found)
        self.plans.sort(key=lambda p: -p.images_per_second)
        del self.plans[self._most :]


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


class _Expansion:
    """The plans of one kind, most promising first."""

    def __init__(self, search: Search, kind: Kind, budget: float, found: _Best, effort: Effort) -> None:
        self._search, self._kind, self._budget, self._found, self._most = search, kind, budget, found, effort.runs
        self._options, self._machine = search.options(kind), search.machine(kind, budget)
        self._alive = in_flight(kind.pipeline, kind.microbatches)
        self._left = effort.prices
        self._runs: dict[tuple[int, int], list[_Run]] = {}
        self._cut = False

    def run(self) -> bool:
        """Offer what is better. False if the effort ended before the kind did."""
        pipeline, depth = self._kind.pipeline, self._search.depth
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
        found = self._search.price(plan, self._kind.batch_size)
        if found.memory_bytes <= self._budget:
            self._found.offer(found)

    def _uniform(self) -> Iterator[_Run]:
        """All blocks under one strategy."""
        pp, depth = self._kind.pipeline.pipeline_degree, self._search.depth
        for option in self._options:
            own, _, _, _, _ = self._sum([(option, "stem", 1), (option, "block", depth), (option, "head", 1)], 0)
            yield _Run(depth, depth, (option, option), own / pp, 0.0)

    def _stage(self, number: int, blocks: int, mixed: bool) -> Iterator[_Run]:
        """Every way to run `blocks` blocks as stage `number` that may fit into memory and be better. mixed: under two
        strategies."""
        more = self._kind.microbatches * self._machine.overhead
        limit, budget = self._limit - more, self._budget
        starts, ends = number == 0, number == self._kind.pipeline.num_stages - 1
        parts = [
            (
                option,
                self._sum([(option, "block", 1)], number),
                self._sum([(option, "stem", int(starts))], number),
                self._sum([(option, "head", int(ends))], number),
            )
            for option in self._options
        ]
        for one, a, stem, _ in parts:
            for other, b, _, head in parts:
                if mixed is (other is one):
                    continue
                low, high = (1, blocks - 1) if mixed else (blocks, blocks)
                # Of own and background seconds, and of both memories, those below what is allowed.
                for which, most in ((0, limit), (1, limit), (3, budget), (4, budget)):
                    low, high = _below(
                        low, high, stem[which] + head[which] + blocks * b[which], a[which] - b[which], most
                    )
                for first in range(low, high + 1):
                    rest = blocks - first
                    own = stem[0] + head[0] + first * a[0] + rest * b[0]
                    sent = stem[1] + head[1] + first * a[1] + rest * b[1]
                    each = stem[2] + head[2] + first * a[2] + rest * b[2]
                    yield _Run(blocks, first, (one, other), max(own, sent) + more, each)

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
