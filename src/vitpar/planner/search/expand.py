"""The plans of one kind, most promising first: how its stages can be run, and how blocks are dealt to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vitpar.planner.cost.price import Price
from vitpar.planner.search.bounds import BYTES, EACH, TIMES, Kind, Machine, stage_sums
from vitpar.planner.search.options import Array, Choices
from vitpar.planner.search.runs import BlockRun, SearchLimits, Ways
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.stages import split_blocks

ALONE = 4
MISFITS = 4
"""How many plans of a kind may turn out not to fit, for every one that may be priced."""


@dataclass(frozen=True)
class SearchEffort:
    """Where a search stops looking.

    Plans with one strategy and even stages are not limited by it. tolerance: no plan that is left is better than the
    chosen one by more than this part. kinds: looked at in detail at most. prices, nodes: plans of a kind to price, and
    parts of pipelines to look at, at most. runs: ways to run a stage that are kept at most, by stage and number of
    blocks. alternatives: plans to remember besides the best. seconds: to search at most; a search that has found
    nothing yet continues if it is patient.
    """

    tolerance: float = 1e-3
    kinds: int = 40
    prices: int = 16
    nodes: int = 2000
    runs: int = 8
    alternatives: int = 10
    seconds: float = 20.0
    patient: bool = True


class BestPlans:
    """The best plans so far, of each form the best.

    limit: seconds an image from which on nothing is better by more than the tolerance. plain: the best with one
    strategy for all layers.
    """

    def __init__(self, effort: SearchEffort) -> None:
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
    """The plans of one kind with several strategies or uneven stages, most promising first.

    choices: strategies of layers. depth: blocks of the model. fits: whether the ranks of a plan have the memory for it.
    price: of a plan and a batch size. found: gets the plans.
    """

    def __init__(
        self,
        kind: Kind,
        choices: Choices,
        machine: Machine,
        depth: int,
        fits: Callable[[Plan, int], bool],
        price: Callable[[Plan, int], Price],
        found: BestPlans,
        effort: SearchEffort,
    ) -> None:
        self._kind, self._choices, self._machine, self._depth = kind, choices, machine, depth
        self._fits, self._price, self._found, self._most = fits, price, found, effort.runs
        # Plans that do not fit are not priced. They are counted separately, since their memory takes a fraction of
        # the time of a price.
        # Without a pipeline there is one run a plan and its price is quick, so more of them are tried.
        self._left = effort.prices * (1 if kind.pipeline.pipeline_degree > 1 else ALONE)
        self._misfits = MISFITS * self._left
        self._stages: dict[int, Ways] = {}
        self._runs: dict[tuple[int, int], list[BlockRun]] = {}
        self._rooms: dict[int, int] = {}
        self._nodes = effort.nodes
        share = float(choices.token_share.min())
        self._hop = 2 * machine.action + 2 * machine.send(share)  # seconds from a stage to the next and back
        self._cut = False
        self._dropped = math.inf  # the quickest run that is not looked at

    def run(self) -> bool:
        """Offer what is better. False if the effort ended before the kind did."""
        pipeline = self._kind.pipeline
        if pipeline.pipeline_degree == 1:
            runs, more = self._stage(0).quickest(self._depth, self._limits, max(1, self._left), mixed=True)
            for run in runs:
                self._try([run])
            self._cut |= more and runs[-1].time < self._limit
        else:
            self._one_strategy()
            self._deal(0, self._depth, 0.0, 0.0, [])
        return not self._cut and self._dropped >= self._limit

    @property
    def _limit(self) -> float:
        """Seconds of a step that would be as good as the best."""
        return self._found.limit * self._kind.batch_size

    def _try(self, runs: list[BlockRun]) -> None:
        """Price the plan of these stages."""
        if max(run.time for run in runs) >= self._limit:
            return
        if self._left <= 0 or self._misfits <= 0:
            self._cut = True
            return
        start = 0
        groups: list[tuple[str, Strategy]] = []
        for run in runs:
            groups += run.groups(start)
            start += run.blocks
        strategies = {strategy for _, strategy in groups}
        sizes = tuple(run.blocks for run in runs)
        layers = (("*", groups[0][1]),) if len(strategies) == 1 else tuple(groups)
        plan = replace(
            self._kind.pipeline, layers=layers, microbatches=self._kind.microbatches, split=_split(sizes, self._depth)
        )
        if not self._fits(plan, self._kind.batch_size):
            self._misfits -= 1
            return
        self._left -= 1
        self._found.offer(self._price(plan, self._kind.batch_size))

    def _one_strategy(self) -> None:
        """Try each strategy for all layers with the stages that suit it best.

        Dynamic programming over stages: the least seconds of a step with `used` blocks in the stages so far. Those
        before a stage take as long for a micro-batch however these blocks are dealt to them.
        """
        options, depth = self._choices.options, self._depth
        stages, limits = self._kind.pipeline.num_stages, self._limits
        least = np.full((depth + 1, len(options)), math.inf)
        least[0] = 0.0
        embed, chosen = np.zeros(len(options)), list[Array]()
        for number in range(stages):
            block, start, end = stage_sums(self._kind, self._choices, self._machine, number)
            embed = start[EACH] if number == 0 else embed
            dealt = np.full_like(least, math.inf)
            sizes = np.zeros(least.shape, int)
            for blocks in range(1, depth - stages + 2):
                sums = start + end + blocks * block
                fits = (sums[BYTES] <= limits.memory).all(0)
                # Blocks in the stages before: one each at least, and one is left for each behind.
                used = slice(number, depth - blocks - (stages - 1 - number) + 1)
                after = slice(used.start + blocks, used.stop + blocks)
                before = np.arange(used.start, used.stop)[:, None] * block[EACH] + (embed + number * self._hop) * (
                    number > 0
                )
                through = sums[0] + before * (not self._kind.pipeline.splits_backward)
                time = np.maximum(least[used], np.maximum(sums[TIMES].max(0), through))
                better = fits & (time < dealt[after])
                dealt[after] = np.where(better, time, dealt[after])
                sizes[after] = np.where(better, blocks, sizes[after])
            least = dealt
            chosen.append(sizes)
        for one in np.argsort(least[depth], kind="stable"):
            time = float(least[depth, one]) + limits.overhead
            if not time < self._limit:
                break
            split: list[int] = []
            left = depth
            for sizes in reversed(chosen):
                split.insert(0, int(sizes[left, one]))
                left -= split[0]
            option = options[one]
            self._try([BlockRun(blocks, blocks, (option, option), time, time, 0.0) for blocks in split])

    def _stage(self, number: int) -> Ways:
        """The ways to run a stage."""
        if number not in self._stages:
            sums = stage_sums(self._kind, self._choices, self._machine, number)
            self._stages[number] = Ways(self._choices.options, *sums)
        return self._stages[number]

    @property
    def _limits(self) -> SearchLimits:
        m, machine = self._kind.microbatches, self._machine
        each = machine.overhead if self._kind.pipeline.pipeline_degree == 1 else 2 * machine.action
        return SearchLimits(self._limit, m * each + machine.norm, machine.budget)

    def _ways(self, number: int, blocks: int) -> list[BlockRun]:
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

    def _deal(self, number: int, left: int, before: float, longest: float, runs: list[BlockRun]) -> None:
        """Give stage `number` and those behind it the `left` blocks. before: seconds in which the stages before it work
        on one micro-batch. longest: seconds of a step so far."""
        stages = self._kind.pipeline.num_stages
        if number == stages:
            self._try(runs)
            return
        self._nodes -= 1
        if self._left <= 0 or self._misfits <= 0 or self._nodes < 0:
            self._cut = True
            return
        behind = stages - number - 1
        even = left / (behind + 1)
        room = sum(map(self._room, range(number + 1, stages)))  # of those behind
        sizes = range(max(1, left - room), min(self._room(number), left - behind) + 1)
        for blocks in sorted(sizes, key=lambda n: abs(n - even)):
            for run in self._ways(number, blocks):
                here = max(longest, run.time, before + run.through)
                if here >= self._limit:
                    break
                self._deal(number + 1, left - blocks, before + run.each + self._hop, here, [*runs, run])


def _split(sizes: tuple[int, ...], depth: int) -> str | tuple[int, ...]:
    """How `Plan` writes stages of so many blocks."""
    even = tuple(len(blocks) for blocks in split_blocks(depth, len(sizes), "even"))
    return "even" if sizes == even else sizes
