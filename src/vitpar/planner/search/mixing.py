"""Plans with several strategies or uneven stages: the fastest mix of an outline, and changes of the best plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, permutations, product

import numpy as np

from vitpar.planner.cost.price import Price
from vitpar.planner.search.bounds import PlanOutline, uniform_bounds
from vitpar.planner.search.costed import CostedSpace
from vitpar.planner.search.dynamic import LayerMix, Programme
from vitpar.planner.search.loads import Array, Indices, undominated
from vitpar.planner.search.options import Choices
from vitpar.planner.search.ranking import BestPlans, SearchEffort
from vitpar.planner.search.space import with_layers, with_tied_alike
from vitpar.planner.search.tables import LayerTable
from vitpar.strategy import CHECKPOINT_POLICIES, Plan, Strategy
from vitpar.strategy.stages import split_blocks

OVER = 0.7
"""Share of the bytes by which a mix does not fit that the next one saves."""
COLUMNS = 12
"""Number of the fastest uniform plans, and of those with the least memory, whose strategies are mixed."""
ALONE = 2
"""Number of uniform plans whose blocks are split into stages in other ways."""
PAIRED = 2
"""Number of uniform plans that do not fit and of those that do, which are mixed in pairs."""
CLOSE = 1.2
"""Ratio of the seconds of a mix by the table to the best price, above which it is not priced."""
NEAR = 1.25
"""Ratio of the seconds of an outline's mix to the best price, below which it is changed."""
ACTIONS = 4000
"""Micro-batches times stages that are replayed at most for changes of the best plan."""
IMPROVED = 3
"""Number of best plans that are changed."""
WORTH = 1e-4
"""Relative time that a change saves at least."""
WORTH_CHANGES = 1.005
"""Ratio of the best price to the bound, below which no plan is changed."""
OTHERS = 4
"""Strategies that are tried for embed, head, or in place of another one."""


class Mixer:
    """Search of plans with several strategies or uneven stages, which are offered to `best_plans`.

    budget: bytes of memory per rank
    """

    def __init__(self, costed: CostedSpace, budget: float, best_plans: BestPlans, effort: SearchEffort) -> None:
        self._costed, self._budget, self.best_plans, self.effort = costed, budget, best_plans, effort
        self._config, self._sections = costed.costs.config, costed.sections

    def mix(self, outline: PlanOutline) -> None:
        """Price the fastest mixes that the programme of an outline finds, and offer them to `best_plans`."""
        choices, machine = self._costed.options(outline), self._costed.machine(outline, self._budget)
        if not choices.strategies:
            return
        table = LayerTable(outline, choices, self._sections, machine, self._costed.moves(outline))
        scaled = self._scaled(table)[: self.effort.sets]
        found = [one for columns in scaled for one in self._fitting(table, columns)]
        best = min(found, key=lambda one: one.seconds, default=None)
        if best and best.seconds < NEAR * self.best_plans.limit * best.batch_size:
            self._improve(best, self.effort.changes // 4)

    def _fitting(self, table: LayerTable, columns: Sequence[Indices]) -> list[Price]:
        """Return prices of the fastest mixes of these columns of each section that fit into memory.

        Where layers share a parameter, a mix is one of several plans.
        """
        outline, found = table.outline, list[Price]()
        rooms = np.full(outline.pipeline.num_stages, table.machine.budget)
        too_large: Array | None = None
        for _ in range(self.effort.mixes):
            limit = CLOSE * self.best_plans.mixed_limit * outline.batch_size - table.overhead
            mixes = Programme(table, rooms, columns).best(limit)
            if not mixes:
                if too_large is None:
                    break
                rooms = (rooms + too_large) / 2
                continue
            tight = np.zeros((len(mixes), len(rooms)))
            for over, mix in zip(tight, mixes, strict=True):
                for plan in with_tied_alike(self._plan(outline, table.choices, mix), self._config, self._costed.tied):
                    needs = np.array(self._costed.place_bytes(plan, outline.batch_size))
                    over[:] = np.maximum(0.0, needs - self._budget)
                    if not over.any():
                        found.append(self._costed.price(plan, outline.batch_size))
                        self.best_plans.offer(found[-1])
            if not tight[0].any():
                break
            # The table leaves out some of the memory.
            too_large = rooms
            rooms = np.where(tight[0] > 0, np.minimum(rooms, mixes[0].peaks) - OVER * tight[0], rooms)
        return found

    def _scaled(self, table: LayerTable) -> list[tuple[Indices, ...]]:
        """Scale the seconds of a table by the prices of uniform plans; return sets of columns to mix in each section.

        First the strategies of uniform plans that no other one is below in seconds, parameters and activations; then
        pairs of a fast uniform plan that does not fit and one that does; then the fastest, each for itself.
        """
        outline, machine = table.outline, table.machine
        choices = self._costed.uniform_options(outline)
        seconds, needs = uniform_bounds(outline, choices, self._sections, machine)
        loads, counts = choices.loads, self._sections.counts
        kept = counts @ (loads.kept + loads.gathered)
        behind = kept + counts @ np.maximum(loads.reduced, loads.gradients)
        working = (loads.working + loads.fresh + loads.copied).max(0)
        costs = np.stack([seconds, kept, behind, counts @ loads.saved, working])
        # Bounds on the wait for gathers and reductions are loose: compare strategies that shard alike only.
        kinds = [(strategies[0].zero, strategies[0].has("fsdp")) for strategies in choices.strategies]
        front = undominated(costs, np.array([kinds.index(kind) for kind in kinds], dtype=np.int64))
        fastest, smallest = (front[np.argsort(by[front], kind="stable")][:COLUMNS] for by in (seconds, needs))
        front = np.array(list(dict.fromkeys([*fastest.tolist(), *smallest.tolist()])), dtype=np.int64)
        left = max(2, ACTIONS // (10 * outline.microbatches * outline.pipeline.num_stages))
        factors = np.zeros(len(front))
        for place, plan in enumerate(front[:left].tolist()):
            layers = self._costed.layers(choices.strategies[plan])
            uniform = replace(outline.pipeline, layers=layers, microbatches=outline.microbatches)
            priced = self._costed.price(uniform, outline.batch_size)
            least = max(1e-9, float(seconds[plan]) - table.overhead)
            factors[place] = max(1.0, (priced.seconds - table.overhead) / least)
        factors[left:] = factors.max(initial=1.0)
        costs[0, front] *= factors
        column = {strategy: number for number, (strategy,) in enumerate(table.choices.strategies)}
        kept_plans = front[undominated(costs[:, front], np.zeros_like(front))]
        factor = dict(zip(front.tolist(), factors.tolist(), strict=True))
        every, alone = [set[int]() for _ in table.choices.fronts], dict[int, tuple[int, ...]]()
        for plan in kept_plans[np.argsort(costs[0, kept_plans], kind="stable")].tolist():
            strategies = choices.strategies[plan]
            chosen = [column[strategies[min(number, len(strategies) - 1)]] for number in range(len(every))]
            alone[plan] = tuple(chosen)
            for section, one in zip(every, chosen, strict=True):
                section.add(one)
                table.scale[one] = max(table.scale[one], factor[plan])
        if not alone:
            return []
        if len(every) > 1:
            for section, more in zip(every, self._section_fronts(table), strict=True):
                table.scale[sorted(more - section)] = factors.max()
                section |= more
        mixed = tuple(np.array(sorted(section), dtype=np.int64) for section in every)
        large, fitting = ([plan for plan in alone if (needs[plan] > machine.budget) == over] for over in (True, False))
        pairs = [
            tuple(np.unique(columns) for columns in zip(alone[one], alone[other], strict=True))
            for one, other in product(large[:PAIRED], fitting[:PAIRED])
        ]
        single = list(alone.values())[: ALONE if outline.pipeline.pipeline_degree > 1 else 0]
        return [mixed, *pairs, *(tuple(np.array([column]) for column in chosen) for chosen in single)]

    def _section_fronts(self, table: LayerTable) -> Iterator[set[int]]:
        """Yield the columns of each section that no other one is below in the seconds and bytes of this section."""
        loads, m = table.choices.loads, table.outline.microbatches
        seconds = m * (loads.work + loads.sent_each) + loads.once + loads.waits_once + loads.sent_once
        for section, columns in zip(self._sections.sections, table.choices.fronts, strict=True):
            rows = [self._sections.kinds.index(kind) for kind in section.kinds]
            counts = self._sections.counts[rows]
            each = (seconds, loads.kept + loads.gathered, loads.gradients, loads.saved)
            costs = np.stack([counts @ cost[rows][:, columns] for cost in each])
            front = undominated(costs, np.zeros_like(columns))
            orders = (front[np.argsort(by[front], kind="stable")][:COLUMNS] for by in (costs[0], costs[1:].sum(0)))
            yield {column for order in orders for column in columns[order].tolist()}

    def improve_best(self, least: float) -> None:
        """Change the best plans, unless they are close to a lower bound on the seconds per image.

        least: the bound
        """
        for best in self.best_plans.plans[:IMPROVED]:
            if self.best_plans.limit > WORTH_CHANGES * least:
                self._improve(best, self.effort.changes)

    def _improve(self, best: Price, changes: int) -> None:
        """Change a plan in one place as long as its price falls.

        changes: number of prices at most; fewer for a plan with many micro-batches and stages
        """
        tried = set[Plan]()
        left = min(changes, ACTIONS // ((best.plan.microbatches or 1) * best.plan.num_stages))
        better = True
        while better:
            better = False
            for plan in self._changed(best):
                if not left:
                    return
                if plan in tried:
                    continue
                tried.add(plan)
                if self._costed.fits(plan, best.batch_size, self._budget):
                    left -= 1
                    priced = self._costed.price(plan, best.batch_size)
                    self.best_plans.offer(priced)
                    if priced.seconds < (1 - WORTH) * best.seconds:
                        best, better = priced, True
                        break

    def _changed(self, best: Price) -> Iterator[Plan]:
        """Yield plans that differ from `best` in the end of a stage, where strategies change, or in one strategy."""
        plan, depth = best.plan, self._sections.depth
        sizes = [len(blocks) for blocks in split_blocks(depth, plan.pipeline_degree, plan.split)]
        strategies = plan.strategies(self._config.layer_names)
        names = list(strategies)
        if plan.virtual_stages > 1:  # the space contains only plans with one strategy in all blocks, and even stages
            yield from self._others(best)
            return
        for source, target in sorted(permutations(range(len(sizes)), 2), key=lambda pair: abs(pair[0] - pair[1])):
            if sizes[source] > 1:
                moved = tuple(n - (stage == source) + (stage == target) for stage, n in enumerate(sizes))
                yield replace(plan, split=split_of(moved))
        sections = [self._sections.sections[number] for number in (0, *self._sections.of_block, -1)]
        for one, other in permutations(plan.distinct, 2):
            places = zip(strategies.items(), sections, strict=True)
            if all(section.fits(other) for (_, present), section in places if present == one):
                layers = {name: other if present == one else present for name, present in strategies.items()}
                yield with_layers(plan, layers)
        # Blocks where the strategy or the stage changes.
        begins = {1 + begin for begin in accumulate(sizes)} | {1}
        edges = dict[int, None]()
        for number, (before, behind) in enumerate(pairwise(names)):
            if strategies[before] != strategies[behind] or number + 1 in begins:
                edges |= {number: None, number + 1: None}
        yield from self._single(plan, strategies, edges, plan.distinct)
        yield from self._others(best)
        policies = product(plan.distinct, (None, *CHECKPOINT_POLICIES))
        others = [replace(one, checkpoint=policy) for one, policy in policies]
        known = self._costed.space.strategies(self._costed.space.ranks // plan.pipeline_degree)
        allowed = [other for other in others if other in known and self._costed.space.allows(plan, other)]
        yield from self._single(plan, strategies, edges, allowed)

    def _single(
        self, plan: Plan, strategies: Mapping[str, Strategy], layers: Iterable[int], others: Sequence[Strategy]
    ) -> Iterator[Plan]:
        """Yield plans with one of `others` in one of these layers, also with embed and head like the blocks beside."""
        names, sections = list(strategies), [0, *self._sections.of_block, -1]
        for number in layers:
            section, name = self._sections.sections[sections[number]], names[number]
            for other in others:
                if other != strategies[name] and section.fits(other):
                    changed = {**strategies, name: other}
                    yield with_layers(plan, changed)
                    ends = {names[0]: changed[names[1]], names[-1]: changed[names[-2]]}
                    yield with_layers(plan, {**changed, **ends})

    def _others(self, best: Price) -> Iterator[Plan]:
        """Yield plans with another strategy of embed or head, or in place of one of the blocks' strategies."""
        plan, m = best.plan, best.plan.microbatches or 1
        strategies = plan.strategies(self._config.layer_names)
        embed, *blocks, head = strategies
        pipeline = replace(plan, layers=Plan().layers, split="even", microbatches=None)
        choices = self._costed.options(PlanOutline(pipeline, best.batch_size, m))
        if not choices.strategies:  # a plan of `reasons` that is not in the space
            return
        places = [(choices.fronts[0], [embed]), (choices.fronts[-1], [head])]
        if plan.virtual_stages == 1:
            for number, front in enumerate(choices.fronts):
                section = [name for name, of in zip(blocks, self._sections.of_block, strict=True) if of == number]
                alike = [[name for name in section if strategies[name] == one] for one in plan.distinct]
                places += [(front, names) for names in alike if names]
        loads = choices.loads
        every = m * (loads.work + loads.sent_each)
        every += loads.once + loads.waits_once + loads.edge + loads.sent_once
        for front, names in places:
            seconds = every[self._sections.kinds.index(self._config.layers[names[-1]].kind)]
            for column in sorted(front.tolist(), key=lambda column: float(seconds[column]))[:OTHERS]:
                other: Strategy = choices.strategies[column][0]
                yield with_layers(plan, {**strategies, **dict.fromkeys(names, other)})

    def _plan(self, outline: PlanOutline, choices: Choices, mix: LayerMix) -> Plan:
        """Return the plan of a mix."""
        names = self._config.layer_names
        layers = {name: choices.strategies[column][0] for name, column in zip(names, mix.columns, strict=True)}
        split = split_of(mix.sizes)
        return with_layers(replace(outline.pipeline, microbatches=outline.microbatches, split=split), layers)


def split_of(sizes: tuple[int, ...]) -> str | tuple[int, ...]:
    """Return `sizes`, the blocks of each stage, as the field `Plan.split`."""
    even = tuple(len(blocks) for blocks in split_blocks(sum(sizes), len(sizes), "even"))
    return "even" if sizes == even else sizes
