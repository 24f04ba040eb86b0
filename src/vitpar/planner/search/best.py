"""Search over outlines, each with a dynamic programme.

An outline is a pipeline with a batch size and a number of micro-batches. Its bound holds for any mix of strategies
(`bounds`). Outlines are visited in the order of their bounds, until no remaining bound beats the best price. In each,
the uniform plans (one strategy, even stages) and the mixes of its programme (`dynamic`) are ordered by the table of
costs, and the first few are priced by the replay. `Result.bound` says what was left out at most.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, pairwise, permutations

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Hops, Price, crowded, hop_seconds, norm_seconds, place_bytes, price
from vitpar.planner.cost.records import PlacedStrategy
from vitpar.planner.cost.stage import exchange_seconds
from vitpar.planner.search.bounds import Machine, PlanOutline, ideal_seconds, uniform_bounds
from vitpar.planner.search.dynamic import Mix, Programme
from vitpar.planner.search.ends import tied_layers, with_layers, with_tied_alike
from vitpar.planner.search.options import Array, Choices, Option, Options
from vitpar.planner.search.ranking import BestPlans, SearchEffort
from vitpar.planner.search.relaxed import STEPS, least_seconds
from vitpar.planner.search.result import Result
from vitpar.planner.search.sections import Sections
from vitpar.planner.search.space import Space
from vitpar.planner.search.tables import LayerTable, Moves, received_shares
from vitpar.strategy import Plan, Strategy, token_layout
from vitpar.strategy.layout import token_layout_key
from vitpar.strategy.selectors import Groups
from vitpar.strategy.stages import split_blocks

OVER = 0.7
"""Share of the bytes by which a mix does not fit that the next one saves."""
ACTIONS = 4000
"""Micro-batches times stages that are replayed at most for changes of the best plan."""
IMPROVED = 3
"""Number of best plans that are changed."""
WORTH = 1e-4
"""Relative time that a change saves at least."""
ENDS = 3
"""Strategies that are tried for embed or head."""
ROUNDING = 1e-9
"""Relative tolerance of the memory budget in bounds."""
now = time.thread_time
"""Clock of the limits, in seconds: on a busy machine a search takes longer, and finds the same."""
Progress = Callable[[int, int, Price | None], None]
"""Progress callback: (steps done, total steps, best price so far or None)."""


class Search:
    """Search of one space of plans for one model and cluster. Prices are cached across calls and budgets.

    space: plans to consider
    costs: costs of layers from the profiles
    moments: bytes of optimizer state per byte of parameters (2 for AdamW)
    effort: default limits of the search
    """

    def __init__(
        self, space: Space, costs: LayerCosts, moments: float = 2, effort: SearchEffort = SearchEffort()
    ) -> None:
        self.space, self.effort = space, effort
        self.costs, self._moments = costs, moments
        self._options = Options(space, costs, moments)
        self._tied = tied_layers(costs.config)
        self._prices: dict[tuple[Plan, int], Price] = {}
        self._shares: dict[tuple[object, ...], Array] = {}
        self._searched: set[tuple[Plan, int]] = set()  # plans whose `frontier` was searched

    def best(
        self, budget: float, progress: Progress = lambda done, total, best: None, effort: SearchEffort | None = None
    ) -> Result:
        """Return the plans with the most samples per second whose ranks need at most `budget` bytes."""
        effort, begun = effort or self.effort, time.perf_counter()
        best_plans = self._known(budget, effort)
        least, outlines = self._visit(budget, effort, best_plans, progress)
        self._improve(budget, best_plans, effort)
        fastest = max((one.images_per_second for one in best_plans.plans), default=0.0)
        bound = max(fastest, 1 / least)
        return Result(
            plans=best_plans.ranked,
            bound=bound,
            exact=bound <= (1 + effort.tolerance) * fastest,
            outlines=outlines,
            priced=len(self._prices),
            strategies=self._options.strategies,
            seconds=time.perf_counter() - begun,
        )

    def _known(self, budget: float, effort: SearchEffort) -> BestPlans:
        """Return the best of all cached prices within `budget` bytes.

        Starting from them keeps a search with more memory from finding a slower plan than an earlier one.
        """
        best_plans = BestPlans(effort)
        for known in self._prices.values():
            if known.memory_bytes <= budget:
                best_plans.offer(known)
        return best_plans

    @property
    def _short(self) -> SearchEffort:
        """Limits of the searches for smaller budgets, whose plans are mainly alternatives."""
        return replace(self.effort, tolerance=0.01, prices=2, mixes=2, changes=0, patient=False)

    def _visit(
        self, budget: float, effort: SearchEffort, best_plans: BestPlans, progress: Progress
    ) -> tuple[float, int]:
        """Search the outlines in the order of their bounds, and offer their plans to `best_plans`.

        Returns (lower bound on the seconds per image of all plans, number of outlines).
        """
        order, until, least = count(), now() + effort.seconds, math.inf
        # (seconds per image at least, tie-breaker, number of improvements of that bound, outline)
        heap = [(self._ideal(outline), next(order), 0, outline) for outline in self._outlines()]
        heapq.heapify(heap)
        total = len(heap)
        while heap:
            bound, _, sharp, outline = heapq.heappop(heap)
            late = now() > until and (best_plans.plans or not effort.patient)
            if bound >= best_plans.limit or late:
                least = min(least, bound)
                break
            # Tighter bounds cost more: compute them only when the cheaper bound is the lowest of all, and requeue.
            if sharp < 2:
                bound = max(bound, self._bound(outline, budget, best_plans.limit, quick=sharp == 0))
                if bound < math.inf:
                    heapq.heappush(heap, (bound, next(order), sharp + 1, outline))
                continue
            # The heap holds bounds only, and this is the lowest: it bounds this outline and all outlines behind it.
            least = min(least, bound)
            progress(total - len(heap), total, best_plans.plans[0] if best_plans.plans else None)
            self._expand(outline, budget, best_plans, effort)
        return least, total

    def _expand(self, outline: PlanOutline, budget: float, best_plans: BestPlans, effort: SearchEffort) -> None:
        """Price the most promising plans of an outline, and offer them to `best_plans`."""
        choices, machine = self._uniform_options(outline), self.machine(outline, budget)
        if not choices.options:
            return
        seconds, needs = uniform_bounds(outline, choices, self._sections, machine)
        fitting = np.nonzero(needs <= machine.budget)[0]
        # The table leaves out some of what the replay counts: its seconds are compared after the same correction.
        longer, left = math.inf, effort.prices
        for place in fitting[np.argsort(seconds[fitting], kind="stable")].tolist():
            at_least = float(seconds[place])
            least = at_least * max(1.0, longer * effort.sure if longer < math.inf else 1.0)
            if not left or least >= best_plans.limit * outline.batch_size:
                break
            layers = self._layers(choices.options[place])
            plan = replace(outline.pipeline, layers=layers, microbatches=outline.microbatches)
            if self._fits(plan, outline.batch_size, budget):
                priced, left = self.price(plan, outline.batch_size), left - 1
                longer = min(longer, priced.seconds / at_least)
                best_plans.offer(priced)
        if outline.pipeline.virtual_stages == 1:  # else the space contains only uniform plans
            self._mix(outline, budget, best_plans, effort, 1.0 if longer == math.inf else max(1.0, longer))

    def _mix(
        self, outline: PlanOutline, budget: float, best_plans: BestPlans, effort: SearchEffort, longer: float
    ) -> None:
        """Price the mixes of an outline's programme, and offer them to `best_plans`.

        longer: seconds of a price over those of the table
        """
        choices, machine = self.options(outline), self.machine(outline, budget)
        if not all(len(front) for front in choices.fronts):
            return
        table = LayerTable(outline, choices, self._sections, machine, self._moves(outline, machine))
        rooms = np.full(outline.pipeline.num_stages, machine.budget)
        for _ in range(effort.mixes):
            limit = best_plans.mixed_limit * outline.batch_size
            limit = (limit / (longer * effort.sure) if effort.sure else math.inf) - table.overhead
            mix = Programme(table, rooms).best(limit)
            if mix is None:
                break
            over = np.zeros(len(rooms))
            for plan in with_tied_alike(self._plan(outline, choices, mix), self.costs.config, self._tied):
                over = np.maximum(0.0, np.array(self.place_bytes(plan, outline.batch_size)) - budget)
                if not over.any():
                    best_plans.offer(self.price(plan, outline.batch_size))
            if not over.any():
                break
            # The table leaves out some of the memory, too.
            rooms = np.where(over > 0, np.minimum(rooms, mix.peaks) - OVER * over, rooms)

    def _improve(self, budget: float, best_plans: BestPlans, effort: SearchEffort) -> None:
        """Change the best plans in one place as long as the replay says that they get faster."""
        for best in best_plans.plans[:IMPROVED]:
            if best.plan.virtual_stages == 1:  # else the space contains only uniform plans
                self._improve_plan(best, budget, best_plans, effort)

    def _improve_plan(self, best: Price, budget: float, best_plans: BestPlans, effort: SearchEffort) -> None:
        tried = set[Plan]()
        left = min(effort.changes, ACTIONS // ((best.plan.microbatches or 1) * best.plan.num_stages))
        better = True
        while better:
            better = False
            for plan in self._changed(best):
                if plan in tried or not left:
                    continue
                tried.add(plan)
                if self._fits(plan, best.batch_size, budget):
                    left -= 1
                    priced = self.price(plan, best.batch_size)
                    best_plans.offer(priced)
                    if priced.seconds < (1 - WORTH) * best.seconds:
                        best, better = priced, True
                        break

    def _changed(self, best: Price) -> Iterator[Plan]:
        """Yield plans that differ from `best` in the end of a stage, where strategies change, or in embed or head."""
        plan, depth = best.plan, self._sections.depth
        sizes = [len(blocks) for blocks in split_blocks(depth, plan.pipeline_degree, plan.split)]
        strategies = plan.strategies(self.costs.config.layer_names)
        names = list(strategies)
        for source, target in sorted(permutations(range(len(sizes)), 2), key=lambda pair: abs(pair[0] - pair[1])):
            if sizes[source] > 1:
                moved = tuple(n - (stage == source) + (stage == target) for stage, n in enumerate(sizes))
                yield replace(plan, split=split_of(moved))
        sections = [self._sections.sections[number] for number in (0, *self._sections.of_block, -1)]
        for place, pair in enumerate(pairwise(names)):
            if strategies[pair[0]] != strategies[pair[1]]:
                for changed, other in ((0, 1), (1, 0)):
                    if sections[place + changed].fits(strategies[pair[other]]):
                        layers = {**strategies, pair[changed]: strategies[pair[other]]}
                        yield with_layers(plan, layers)
                        ends = {names[0]: layers[names[1]], names[-1]: layers[names[-2]]}
                        yield with_layers(plan, {**layers, **ends})
        pipeline = replace(plan, layers=Plan().layers, split="even", microbatches=None)
        choices = self.options(PlanOutline(pipeline, best.batch_size, plan.microbatches or 1))
        if not choices.options:  # a plan of `reasons` that is not in the space
            return
        for name, front in ((names[0], choices.fronts[0]), (names[-1], choices.fronts[-1])):
            row = choices.kinds.index(self.costs.config.layers[name].kind)
            seconds = sum(
                choices.loads[field][row] for field in ("computes", "waits", "sent_each", "once", "waits_once")
            )
            for column in sorted(front.tolist(), key=lambda column: float(seconds[column]))[:ENDS]:
                yield with_layers(plan, {**strategies, name: choices.options[column].strategy})

    def _plan(self, outline: PlanOutline, choices: Choices, mix: Mix) -> Plan:
        """Return the plan of a mix."""
        names = self.costs.config.layer_names
        layers = {name: choices.options[column].strategy for name, column in zip(names, mix.columns, strict=True)}
        split = split_of(mix.sizes)
        return with_layers(replace(outline.pipeline, microbatches=outline.microbatches, split=split), layers)

    def _layers(self, option: Option) -> Groups:
        """Return the strategies of all layers in a plan with one strategy, as `Plan.layers`."""
        if not option.sections:
            return (("*", option.strategy),)
        pairs = zip(self._sections.sections, option.sections, strict=True)
        return tuple((f"{section.blocks[0]}-{section.blocks[-1]}", strategy) for section, strategy in pairs)

    def _moves(self, outline: PlanOutline, machine: Machine) -> Moves:
        """Return the function of the seconds of redistribution between two blocks in plans of an outline."""
        pipeline, costs = outline.pipeline, self.costs
        where = PlacedStrategy(pp=pipeline.pipeline_degree, splits=pipeline.splits_backward)

        def moves(elements: int, strategies: tuple[Strategy, ...]) -> Array:
            stage, layouts = costs.position(strategies[0], where).groups.stage, tuple(map(token_layout_key, strategies))
            if layouts not in self._shares:
                self._shares[layouts] = received_shares([token_layout(strategy) for strategy in strategies])
            shares, whole = self._shares[layouts], outline.rows * elements * costs.precision.compute.itemsize
            sizes, places = np.unique(shares, return_inverse=True)
            seconds = np.array([exchange_seconds(costs.links, stage, size * whole) if size else 0.0 for size in sizes])
            there = seconds[places].reshape(shares.shape) * (machine.sending / machine.speed)
            # Below the lowest trained layer nothing comes back.
            return there + there.T * costs.passes_gradients

        return moves

    def frontier(self, best: Price, points: int = 6, step: float = 0.7) -> tuple[Price, ...]:
        """Return the fastest plans of the space for decreasing memory, `best` first.

        Each plan needs at most `step` times the memory of the one before. Short searches for these budgets add prices,
        once per plan; the plans are then chosen from all cached prices. If none needs that little, the plan with the
        least memory follows the best.

        points: number of plans at most
        """
        key, budget = (best.plan, best.batch_size), best.memory_bytes
        for _ in range(0 if key in self._searched else points - 1):
            plans = self.best(step * budget, effort=self._short).plans
            if not plans:
                break
            budget = plans[0].memory_bytes
        self._searched.add(key)
        # Choose from all prices only now: a search for a smaller budget may have found the fastest for a larger one.
        # Uniform plans may be priced without being in the space (`reasons`).
        known = [one for one in self._prices.values() if not one.plan.is_uniform or self.space.covers(one.plan)]
        known = [one for one in known if one.images_per_second <= (1 + self.effort.tolerance) * best.images_per_second]
        prices = [best]
        while len(prices) < points:
            fitting = [one for one in known if one.memory_bytes <= step * prices[-1].memory_bytes]
            if not fitting:
                break
            prices.append(max(fitting, key=lambda one: one.images_per_second))
        if len(prices) == 1:
            least = min(known, key=lambda one: one.memory_bytes, default=best)
            prices += [least] if least.memory_bytes < best.memory_bytes else []
        return tuple(prices)

    def price(self, plan: Plan, batch_size: int) -> Price:
        """Return the price of a validated plan, cached."""
        key = plan, batch_size
        if key not in self._prices:
            self._prices[key] = self._price(plan, batch_size)
        return self._prices[key]

    def _price(self, plan: Plan, batch_size: int) -> Price:
        return price(plan, self.costs, batch_size, self._moments)

    def place_bytes(self, plan: Plan, batch_size: int) -> tuple[float, ...]:
        """Return the peak bytes of the fullest rank at each index of the pp axis, for a validated plan."""
        return place_bytes(plan, self.costs, batch_size, self._moments)

    def _fits(self, plan: Plan, batch_size: int, budget: float) -> bool:
        if self._separates(plan):
            return False
        known = self._prices.get((plan, batch_size))
        return (known.memory_bytes if known else max(self.place_bytes(plan, batch_size))) <= budget

    def _separates(self, plan: Plan) -> bool:
        """Return whether layers that share a parameter have different strategies, which the runtime refuses."""
        return next(with_tied_alike(plan, self.costs.config, self._tied)) != plan

    def _outlines(self) -> Iterator[PlanOutline]:
        for batch_size in self.space.batch_sizes:
            for pipeline in self.space.pipelines():
                for microbatches in self.space.microbatches(pipeline, batch_size):
                    yield PlanOutline(pipeline, batch_size, microbatches)

    def options(self, outline: PlanOutline) -> Choices:
        """Return the strategies that layers of an outline's plans choose from, with their costs."""
        return self._options.of(outline.pipeline, outline.rows)

    def _uniform_options(self, outline: PlanOutline) -> Choices:
        """Return the options of plans with one strategy, or with its counterparts where it does not fit."""
        one = len(self._sections.sections) == 1
        return self.options(outline) if one else self._options.uniform(outline.pipeline, outline.rows)

    def machine(self, outline: PlanOutline, budget: float) -> Machine:
        """Return the cluster's rates and memory as the bounds of an outline need them."""
        costs, config, pipeline = self.costs, self.space.config, outline.pipeline
        pp = pipeline.pipeline_degree
        size, at_once = self.space.ranks // pp, costs.at_once(self.space.ranks // pp)
        speed, sending = min(1.0, at_once), crowded(at_once, pp)
        overlap = costs.hardware.overlap
        tokens = outline.rows * min(self._sections.takes[:-1]) * costs.precision.compute.itemsize
        return Machine(
            alone=costs.crowd(1),
            sending=sending,
            speed=speed,
            lanes=min(at_once, pp),
            overhead=costs.model.microbatch * costs.crowd(size),
            action=(costs.model.microbatch / 2 * costs.crowd(1) + costs.hardware.pipeline * sending) / speed,
            norm=norm_seconds(costs, self.space.ranks) + costs.teacher_seconds(outline.batch_size, self.space.ranks),
            overlap=(overlap.compute, overlap.communication) if overlap else (1.0, 1.0),
            hops=lambda share: self._hops(pipeline, share * tokens),
            # Bounds sum the same bytes in another order than prices do: a plan that just fits must not be ruled out.
            budget=(1 + ROUNDING) * (budget - costs.hardware.reserved_bytes - costs.teacher_bytes(self.space.ranks)),
            images=outline.batch_size * config.input.bytes(costs.precision.compute.itemsize),
            tokens=tokens * costs.passes_gradients,
        )

    def _hops(self, pipeline: Plan, size: float) -> Hops:
        """Return the seconds of messages of `size` bytes between the stages of a pipeline, which is outermost."""
        # With frozen layers below, some stages neither send gradients nor receive them.
        if pipeline.pipeline_degree == 1 or not self.costs.passes_gradients:
            return Hops((0.0,) * (pipeline.num_stages - 1))
        return hop_seconds(pipeline, self.costs, self.space.ranks // pipeline.pipeline_degree, size)

    def _ideal(self, outline: PlanOutline) -> float:
        """Return seconds per image with the fastest computing for every layer, no communication and no memory limit."""
        works = self._options.least_work(outline.pipeline, outline.rows)
        work = sum(number * each for number, each in zip(self._sections.counts.tolist(), works, strict=True) if each)
        sizes = [len(blocks) for blocks in split_blocks(self._sections.depth, outline.pipeline.num_stages, "even")]
        share = self._sections.least_share(sizes, works)
        return ideal_seconds(outline, work, share, self.machine(outline, math.inf)) / outline.batch_size

    def _bound(self, outline: PlanOutline, budget: float, limit: float, quick: bool) -> float:
        """Return a lower bound on the seconds per image of all plans of an outline; infinite if none fits into memory.

        limit: value of the bound that is high enough; tightening stops there
        quick: whether to skip the relaxation over mixes
        """
        machine, enough = self.machine(outline, budget), limit * outline.batch_size
        steps = 0 if quick else STEPS
        seconds = least_seconds(outline, self.options(outline), self._sections, machine, steps=steps, enough=enough)
        return seconds / outline.batch_size

    @property
    def _sections(self) -> Sections:
        return self.space.sections


def split_of(sizes: tuple[int, ...]) -> str | tuple[int, ...]:
    """Return `sizes`, the blocks of each stage, as the field `Plan.split`."""
    even = tuple(len(blocks) for blocks in split_blocks(sum(sizes), len(sizes), "even"))
    return "even" if sizes == even else sizes
