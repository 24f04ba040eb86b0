"""Expansion of one kind: branch and bound over the split into stages and the strategies of each stage."""

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
"""Factor on `SearchEffort.prices` without a pipeline, where a price is quick."""
MISFITS = 4
"""Plans of a kind that may be found not to fit, for each plan that may be priced."""


@dataclass(frozen=True)
class SearchEffort:
    """Limits of a search. Uniform plans (one strategy, even stages) are limited only by `seconds`, unless `patient`."""

    tolerance: float = 1e-3
    """Relative speedup over the chosen plan that an exact search may miss."""
    kinds: int = 40
    """Kinds to expand at most."""
    prices: int = 16
    """Plans to price at most, per expanded kind."""
    nodes: int = 2000
    """Nodes of the tree of splits to visit at most, per expanded kind."""
    runs: int = 8
    """Ways to run a stage to keep at most, per stage and number of blocks."""
    alternatives: int = 10
    """Plans to keep besides the best."""
    seconds: float = 20.0
    """Duration of the search at most."""
    patient: bool = True
    """Whether to exceed `seconds` until all uniform plans are done and a plan is found."""


class BestPlans:
    """The best prices so far, at most one per `form`.

    plans: fastest first
    plain: the fastest with one strategy for all layers; None if there is none
    """

    def __init__(self, effort: SearchEffort) -> None:
        self.plans: list[Price] = []
        self.plain: Price | None = None
        # Half of the tolerance is for ruling out plans, half for preferring a simple plan (`ranked`): together they
        # stay within it.
        self._most, self._tolerance = 1 + effort.alternatives, effort.tolerance / 2

    @property
    def limit(self) -> float:
        """Seconds per image from which on a plan is not better than the best by more than the tolerance."""
        return (1 - self._tolerance) / self.plans[0].images_per_second if self.plans else math.inf

    def offer(self, found: Price) -> None:
        """Add the price of a plan that fits into memory, if it is the fastest of its form."""
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
        """The simplest plan within the tolerance of the fastest, then the other plans, fastest first.

        Simple means, in this order: few strategies, few micro-batches, little memory.
        """
        if not self.plans:
            return ()
        enough = (1 - self._tolerance) * self.plans[0].images_per_second
        every = [*self.plans, *((self.plain,) if self.plain and all(p is not self.plain for p in self.plans) else ())]
        alike = [found for found in every if found.images_per_second >= enough]
        first = min(alike, key=lambda p: (len(p.plan.kinds), p.plan.microbatches or 1, p.memory_bytes))
        return first, *(found for found in every if found is not first)


def form(price: Price) -> tuple:
    """Return a key that is equal for plans that differ only in the split and in where strategies change."""
    plan = price.plan
    return plan.pp, plan.schedule, plan.virtual_stages, frozenset(plan.kinds), plan.microbatches, price.batch_size


class Expansion:
    """Search of one kind's plans with several strategies or uneven stages.

    kind: pipeline, batch size and number of micro-batches
    choices: strategies that layers choose from
    machine: rates and memory for the bounds
    depth: number of blocks of the model
    fits: function of a plan and a batch size: whether the plan fits into memory
    price: function of a plan and a batch size that returns its price
    found: receives the prices; its limit prunes the search
    effort: limits of the search
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
        # Plans that do not fit are counted separately: computing memory takes a fraction of the time of a price.
        self._left = effort.prices * (1 if kind.pipeline.pipeline_degree > 1 else ALONE)
        self._misfits = MISFITS * self._left
        self._stages: dict[int, Ways] = {}
        self._runs: dict[tuple[int, int], list[BlockRun]] = {}
        self._rooms: dict[int, int] = {}
        self._nodes = effort.nodes
        share = float(choices.token_share.min())
        self._hop = 2 * machine.action + 2 * machine.send(share)  # seconds from a stage to the next and back
        self._cut = False  # whether a limit of the effort ended the search
        self._dropped = math.inf  # lower bound on the seconds of a step of the runs that `_ways` dropped

    def run(self) -> bool:
        """Search the kind and offer its plans to `found`. Return whether no plan that could win was skipped."""
        pipeline = self._kind.pipeline
        if pipeline.pipeline_degree == 1:
            # Plans with one strategy are uniform plans, which are tried before.
            runs, more = self._stage(0).quickest(self._depth, self._limits, max(1, self._left), mixed=True)
            for run in runs:
                self._try([run])
            self._cut |= more and runs[-1].time < self._limit
        else:
            # Cheap and usually good: its prices lower the limit that prunes `_deal`.
            self._one_strategy()
            self._deal(0, self._depth, 0.0, 0.0, [])
        # The limit may have fallen since runs were dropped: those above it now could not have won.
        return not self._cut and self._dropped >= self._limit

    @property
    def _limit(self) -> float:
        """Seconds of a step below which a plan would be better than the best by more than the tolerance."""
        return self._found.limit * self._kind.batch_size

    def _try(self, runs: list[BlockRun]) -> None:
        """Price the plan with these stages if it can win, fits, and the effort allows it."""
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
            self._kind.pipeline, layers=layers, microbatches=self._kind.microbatches, split=split_of(sizes, self._depth)
        )
        if not self._fits(plan, self._kind.batch_size):
            self._misfits -= 1
            return
        self._left -= 1
        self._found.offer(self._price(plan, self._kind.batch_size))

    def _one_strategy(self) -> None:
        """Try each strategy for all layers, with the split that has its lowest bound.

        Dynamic programming over stages, for all strategies together: `least[used]` is the lowest bound on a step with
        `used` blocks in the stages so far. One value per number of blocks is enough: with one strategy, a micro-batch
        takes equally long through the earlier stages however their blocks are split.
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
                # Each of the earlier and of the later stages has at least one block.
                used = slice(number, depth - blocks - (stages - 1 - number) + 1)
                after = slice(used.start + blocks, used.stop + blocks)
                # Seconds of a micro-batch in the earlier stages, both ways: see row 0 of `stage_sums`.
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
        """Return the ways to run stage `number`, cached."""
        if number not in self._stages:
            sums = stage_sums(self._kind, self._choices, self._machine, number)
            self._stages[number] = Ways(self._choices.options, *sums)
        return self._stages[number]

    @property
    def _limits(self) -> SearchLimits:
        """Limits of the ways to run a stage, by the best price so far."""
        m, machine = self._kind.microbatches, self._machine
        each = machine.overhead if self._kind.pipeline.pipeline_degree == 1 else 2 * machine.action
        return SearchLimits(self._limit, m * each + machine.norm, machine.budget)

    def _ways(self, number: int, blocks: int) -> list[BlockRun]:
        """Return the fastest ways to run stage `number` with so many blocks, cached. Records what is dropped."""
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
        """Return the maximum number of blocks of stage `number`: a run with fewer blocks is faster and smaller."""
        if number not in self._rooms:
            sizes = range(1, self._depth + 1)
            self._rooms[number] = next((n - 1 for n in sizes if not self._ways(number, n)), self._depth)
        return self._rooms[number]

    def _deal(self, number: int, left: int, before: float, longest: float, runs: list[BlockRun]) -> None:
        """Try the splits of the last `left` blocks over stage `number` and the later ones, depth first.

        before: seconds of one micro-batch in the earlier stages, forward and backward
        longest: lower bound on the seconds of a step by the earlier stages
        runs: ways to run the earlier stages
        """
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
        room = sum(map(self._room, range(number + 1, stages)))  # blocks that the later stages can have
        sizes = range(max(1, left - room), min(self._room(number), left - behind) + 1)
        # Nearly even splits first: they are usually best, and a good price early prunes the others.
        for blocks in sorted(sizes, key=lambda n: abs(n - even)):
            for run in self._ways(number, blocks):
                if max(longest, run.time) >= self._limit:
                    break
                # Runs are ordered by their time: one that is slower to pass through may come before a quicker one.
                here = max(longest, run.time, before + run.through)
                if here < self._limit:
                    self._deal(number + 1, left - blocks, before + run.each + self._hop, here, [*runs, run])


def split_of(sizes: tuple[int, ...], depth: int) -> str | tuple[int, ...]:
    """Return `sizes`, the blocks of each stage, as the field `Plan.split`."""
    even = tuple(len(blocks) for blocks in split_blocks(depth, len(sizes), "even"))
    return "even" if sizes == even else sizes
