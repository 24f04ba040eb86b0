"""The plans of one kind, most promising first: how its stages can be run, and how blocks are dealt to them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vitpar.planner.cost.price import Price
from vitpar.planner.profile.profiles import LayerKind
from vitpar.planner.search.bounds import Kind, Machine, in_flight
from vitpar.planner.search.options import Option
from vitpar.planner.search.runs import Limits, Parts, Run, Ways
from vitpar.strategy import Plan, Strategy


@dataclass(frozen=True)
class Effort:
    """Where a search stops looking.

    tolerance: no plan that is left is better than the chosen one by more than this part. kinds: looked at in detail at
    most. prices: of a kind at most. runs: ways to run a stage that are kept at most, by stage and number of blocks.
    alternatives: plans to remember besides the best. seconds: to search at most, and for a kind; a search that has
    found nothing yet goes on if it is patient.
    """

    tolerance: float = 1e-3
    kinds: int = 60
    prices: int = 40
    runs: int = 12
    alternatives: int = 10
    seconds: float = 60.0
    patient: bool = True


class Best:
    """The best plans so far, of each form the best.

    limit: seconds an image from which on nothing is better by more than the tolerance. plain: the best with one
    strategy for all layers.
    """

    def __init__(self, effort: Effort) -> None:
        self.plans: list[Price] = []
        self.plain: Price | None = None
        # Half for what is not looked at, half for choosing what is simple.
        self._most, self._tolerance = 1 + effort.alternatives, effort.tolerance / 2

    @property
    def limit(self) -> float:
        return (1 - self._tolerance) / self.plans[0].images_per_second if self.plans else math.inf

    def offer(self, found: Price) -> None:
        """A plan that fits."""
        if len(found.plan.kinds) == 1 and (not self.plain or found.images_per_second > self.plain.images_per_second):
            self.plain = found
        mine = form(found)
        if any(form(p) == mine and p.images_per_second >= found.images_per_second for p in self.plans):
            return
        self.plans = [other for other in self.plans if form(other) != mine]
        self.plans.append(found)
        self.plans.sort(key=lambda p: -p.images_per_second)
        del self.plans[self._most :]

    @property
    def ranked(self) -> tuple[Price, ...]:
        """The best first; of those as good but for the tolerance the simplest: one strategy, few micro-batches, little
        memory."""
        if not self.plans:
            return ()
        enough = (1 - self._tolerance) * self.plans[0].images_per_second
        every = [*self.plans, *((self.plain,) if self.plain and all(p is not self.plain for p in self.plans) else ())]
        alike = [found for found in every if found.images_per_second >= enough]
        first = min(alike, key=lambda p: (len(p.plan.kinds), p.plan.microbatches or 1, p.memory_bytes))
        return first, *(found for found in every if found is not first)


def form(price: Price) -> tuple:
    """Equal for plans that differ only in where strategies change."""
    plan = price.plan
    return plan.pp, plan.schedule, plan.virtual_stages, frozenset(plan.kinds), plan.microbatches, price.batch_size


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
        self._stages: dict[int, Ways] = {}
        self._runs: dict[tuple[int, int], list[Run]] = {}
        self._rooms: dict[int, int] = {}
        self._until = time.perf_counter() + effort.seconds
        self._cut = False
        self._dropped = math.inf  # the quickest run that is not looked at

    def run(self) -> bool:
        """Offer what is better. False if the effort ended before the kind did."""
        pipeline, depth = self._kind.pipeline, self._depth
        if pipeline.virtual_stages > 1:
            for run in sorted(self._uniform(), key=lambda run: run.time):
                self._try([run], "even")
        elif pipeline.pipeline_degree == 1:
            for mixed in (False, True):  # what is simple first: it keeps most mixtures from being looked at
                runs, more = self._stage(0).quickest(depth, self._limits, max(1, self._left), mixed)
                for run in runs:
                    self._try([run])
                self._cut |= more and runs[-1].time < self._limit
        else:
            self._deal(0, depth, 0.0, 0.0, [])
        return not self._cut and self._dropped >= self._limit

    @property
    def _limit(self) -> float:
        """Seconds of a step that would be as good as the best."""
        return self._found.limit * self._kind.batch_size

    def _try(self, runs: list[Run], split: str | None = None) -> None:
        """Price the plan of these stages."""
        if max(run.time for run in runs) >= self._limit:
            return
        if self._left <= 0:
            self._cut = True
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

    def _uniform(self) -> Iterator[Run]:
        """All blocks under one strategy."""
        pp, depth = self._kind.pipeline.pipeline_degree, self._depth
        for option in self._options:
            own, _, _, _, _ = self._sum([(option, "stem", 1), (option, "block", depth), (option, "head", 1)], 0)
            yield Run(depth, depth, (option, option), own / pp, 0.0)

    def _stage(self, number: int) -> Ways:
        """The ways to run a stage."""
        if number not in self._stages:
            starts, ends = number == 0, number == self._kind.pipeline.num_stages - 1
            self._stages[number] = Ways(
                [
                    Parts(
                        option,
                        self._sum([(option, "block", 1)], number),
                        self._sum([(option, "stem", int(starts))], number),
                        self._sum([(option, "head", int(ends))], number),
                    )
                    for option in self._options
                ]
            )
        return self._stages[number]

    @property
    def _limits(self) -> Limits:
        overhead = self._kind.microbatches * self._machine.overhead
        return Limits(self._limit, overhead, self._machine.budget)

    def _sum(self, layers: list[tuple[Option, LayerKind, int]], number: int) -> tuple[float, ...]:
        """Of so many layers in stage `number`: seconds of the rank and of the background in a step, seconds of a
        micro-batch, bytes when the optimizer steps and when the last backward begins."""
        m, alive = self._kind.microbatches, self._alive[number]
        waiting = m > (1 if self._kind.pipeline.pipeline_degree == 1 else alive)
        own = sent = each = resting = busy = 0.0
        for option, kind, times in layers:
            load = option.loads[kind]
            work = self._machine.work(load) / self._machine.speed
            own += times * (m * work + self._machine.once(load))
            sent += times * (m * load.sent_each + load.sent_once)
            each += times * work
            resting += times * (load.kept + load.reduced)
            busy += times * (load.kept + load.gathered + load.gradients * waiting + alive * load.saved)
        return own, sent, each, resting, busy

    def _ways(self, number: int, blocks: int) -> list[Run]:
        """The quickest ways to run a stage."""
        key = number, blocks
        if key not in self._runs:
            pairs = (self._stage(number).quickest(blocks, self._limits, self._most, mixed) for mixed in (False, True))
            (plain, more), (mixed, yet_more) = pairs
            every = sorted((*plain, *mixed), key=lambda run: run.time)
            self._runs[key] = every[: self._most]
            if more or yet_more or len(every) > self._most:
                self._dropped = min(self._dropped, self._runs[key][-1].time)
        return self._runs[key]

    def _room(self, number: int) -> int:
        """How many blocks a stage can have at most; fewer are easier."""
        if number not in self._rooms:
            sizes = range(1, self._depth + 1)
            self._rooms[number] = next((n - 1 for n in sizes if not self._ways(number, n)), self._depth)
        return self._rooms[number]

    def _deal(self, number: int, left: int, before: float, longest: float, runs: list[Run]) -> None:
        """Give stage `number` and those behind it the `left` blocks. before: seconds in which the stages before it work
        on one micro-batch. longest: seconds of a step so far."""
        stages = self._kind.pipeline.num_stages
        if number == stages:
            self._try(runs)
            return
        if self._left <= 0 or time.perf_counter() > self._until:
            self._cut = True
            return
        travels = not self._kind.pipeline.splits_backward
        behind = stages - number - 1
        even = left / (behind + 1)
        room = sum(map(self._room, range(number + 1, stages)))  # of those behind
        sizes = range(max(1, left - room), min(self._room(number), left - behind) + 1)
        for blocks in sorted(sizes, key=lambda n: abs(n - even)):
            for run in self._ways(number, blocks):
                here = max(longest, before + run.time)
                if here >= self._limit:
                    break
                self._deal(number + 1, left - blocks, before + run.each * travels, here, [*runs, run])
