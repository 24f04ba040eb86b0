"""Expansion of one outline: proposals of good mixes and splits, then enumeration of what bounds leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from vitpar.planner.cost.price import Price
from vitpar.planner.search.bounds import Machine, PlanOutline
from vitpar.planner.search.enumeration import Enumeration
from vitpar.planner.search.mixes import Proposals, Runs, cheapest_mixes
from vitpar.planner.search.options import Array, Choices
from vitpar.planner.search.ranking import BestPlans, SearchEffort
from vitpar.planner.search.relaxed import least_seconds
from vitpar.planner.search.sections import Sections
from vitpar.planner.search.tables import LayerTable, MixTable, Moves
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.stages import split_blocks

ALONE = 4
"""Factor on `SearchEffort.prices` without a pipeline, where a price is quick."""
MISFITS = 4
"""Plans of an outline that may be found not to fit, for each plan that may be priced."""
ROOMS = (1.0, 0.93, 0.86, 0.8, 0.7)
"""Shares of the memory that proposals get by the bounds, one after the other while some do not fit: prices count more.
"""
MOST_MISFITS = 8
"""Proposals of one of `ROOMS` that may be found not to fit."""


class Expansion:
    """Search of an outline's plans with several strategies or uneven stages.

    outline: pipeline, batch size and number of micro-batches
    choices: strategies that layers choose from
    machine: rates and memory for the bounds
    sections: sections of the model's blocks
    moves: seconds of redistribution between blocks
    alike: function of a plan that yields it, or where layers that share a parameter differ, plans in which they do not
    fits: function of a plan and a batch size: whether the plan fits into memory
    price: function of a plan and a batch size that returns its price
    best_plans: receives the prices; its limit prunes the search
    effort: limits of the search
    late: returns whether the time of the search is up
    """

    def __init__(
        self,
        outline: PlanOutline,
        choices: Choices,
        machine: Machine,
        sections: Sections,
        moves: Moves,
        alike: Callable[[Plan], Iterator[Plan]],
        fits: Callable[[Plan, int], bool],
        price: Callable[[Plan, int], Price],
        best_plans: BestPlans,
        effort: SearchEffort,
        late: Callable[[], bool],
    ) -> None:
        self._outline, self._choices, self._machine, self._sections = outline, choices, machine, sections
        self._alike, self._fits, self._price, self._best_plans = alike, fits, price, best_plans
        self._nodes, self._late = effort.nodes, late
        self._table = LayerTable(outline, choices, sections, machine, moves)
        # Plans that do not fit are counted separately: computing memory takes a fraction of the time of a price.
        self._left = effort.prices * (1 if outline.pipeline.pipeline_degree > 1 else ALONE)
        self._misfits = MISFITS * self._left
        each = machine.overhead if outline.pipeline.pipeline_degree == 1 else 2 * machine.action
        self._overhead = outline.microbatches * each + machine.norm
        self._hop = 2 * machine.action + 2 * min(machine.hops(float(choices.token_share.min())).each, default=0.0)
        self._tried: set[Plan] = set()
        self._cut = False

    def run(self) -> bool:
        """Search the outline and offer its plans to `best_plans`. Return whether no plan that could win was skipped."""
        if all(len(front) for front in self._choices.fronts):
            self._propose()
            complete = Enumeration(self._table, self._hop, self._limits, self._give, self._nodes, self._late).run()
            return complete and not self._cut
        return True

    def _propose(self) -> None:
        """Price the plans that `Proposals` makes, for half of the prices of the effort."""
        limits, scale = self._limits(), np.ones(7)
        least = least_seconds(self._outline, self._choices, self._sections, self._machine, steps=0)
        scale[:5] = limits[0] if np.isfinite(limits[0]) else 1.2 * least
        scale[5:] = self._machine.budget if np.isfinite(self._machine.budget) else 1e30
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            return
        mixes = MixTable(self._table, cheapest_mixes(self._table, scale))
        kept, pipelined = self._left // 2, self._outline.pipeline.pipeline_degree > 1
        for share in ROOMS:
            before = self._misfits
            proposals = Proposals(mixes, self._overhead, self._hop, share * self._machine.budget)
            for proposal in proposals.pipelined() if pipelined else proposals.single():
                if proposal.seconds >= self._limits()[0] or self._left <= kept:
                    break
                if not self._give(list(proposal.stages), proposal.seconds) or before - self._misfits > MOST_MISFITS:
                    break
            if before == self._misfits:
                break
        self._cut, self._misfits = False, max(self._misfits, MISFITS * kept)

    def _limits(self) -> Array:
        """Return the limits of a stage by the best price so far, in the order of `LIMITED`."""
        seconds = self._best_plans.mixed_limit * self._outline.batch_size - self._overhead
        return np.array([seconds] * 5 + [self._machine.budget] * 2)

    def _give(self, stages: list[tuple[int, Runs]], seconds: float) -> bool:
        """Price the plan with these stages if it can win and fits. Return false if the effort is used up."""
        if seconds >= self._limits()[0]:
            return True
        for plan in self._alike(self._plan(stages)):
            if plan in self._tried:
                continue
            if self._left <= 0 or self._misfits <= 0 or self._late():
                self._cut = True
                return False
            self._tried.add(plan)
            if self._fits(plan, self._outline.batch_size):
                self._left -= 1
                self._best_plans.offer(self._price(plan, self._outline.batch_size))
            else:
                self._misfits -= 1
        return True

    def _plan(self, stages: list[tuple[int, Runs]]) -> Plan:
        """Return the plan with these stages."""
        sizes = tuple(blocks for blocks, _ in stages)
        starts = [(first, self._choices.options[column].strategy) for _, runs in stages for first, column in runs]
        stops = [first for first, _ in starts[1:]] + [self._sections.depth]
        groups: tuple[tuple[str, Strategy], ...] = tuple(
            (f"{first}-{stop - 1}", strategy) for (first, strategy), stop in zip(starts, stops, strict=True)
        )
        one = len({strategy for _, strategy in groups}) == 1
        return replace(
            self._outline.pipeline,
            layers=(("*", groups[0][1]),) if one else groups,
            microbatches=self._outline.microbatches,
            split=split_of(sizes, self._sections.depth),
        )


def split_of(sizes: tuple[int, ...], depth: int) -> str | tuple[int, ...]:
    """Return `sizes`, the blocks of each stage, as the field `Plan.split`."""
    even = tuple(len(blocks) for blocks in split_blocks(depth, len(sizes), "even"))
    return "even" if sizes == even else sizes
