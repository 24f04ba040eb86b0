"""Best-first branch and bound over outlines of plans.

An outline is a pipeline with a batch size and a number of micro-batches. Its bound holds for any mix of strategies
(`bounds`, `relaxed`). The outline with the lowest bound is expanded first, until no remaining bound beats the best
price. Within an outline, plans are visited in the order of their own bounds, and priced only if that bound beats the
best price. The result is therefore the best plan of the space, unless `SearchEffort` cut an outline short. In that case
`Result.exact` is false, and `Result.bound` still holds.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Hops, Price, crowded, hop_seconds, memory_bytes, norm_seconds, price
from vitpar.planner.cost.records import PlacedStrategy
from vitpar.planner.cost.stage import exchange_seconds
from vitpar.planner.search.bounds import Machine, PlanOutline, ideal_seconds, uniform_bounds
from vitpar.planner.search.ends import tied_layers, with_other_ends, with_tied_alike
from vitpar.planner.search.expand import Expansion
from vitpar.planner.search.options import Array, Choices, Option, Options
from vitpar.planner.search.ranking import BestPlans, SearchEffort
from vitpar.planner.search.relaxed import STEPS, least_seconds
from vitpar.planner.search.result import Result
from vitpar.planner.search.sections import Sections
from vitpar.planner.search.space import Space
from vitpar.planner.search.tables import Moves, received_shares
from vitpar.strategy import Plan, Strategy, token_layout
from vitpar.strategy.layout import token_layout_key
from vitpar.strategy.selectors import Groups
from vitpar.strategy.stages import split_blocks

ROUNDING = 1e-9
"""Relative tolerance of the memory budget in bounds."""
WORTH_MORE = 0.1
"""`Result.gap` above which an inexact search looks for faster plans on its frontier, too."""
ENDS = 2
"""Number of best plans whose embed and head are tried with other strategies."""
WORTH_OTHER_ENDS = 1e-3
"""Relative time that another strategy of embed or head must save."""
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
        config = costs.config
        self._tied = tied_layers(config)
        ends = (frozenset({layer.name}) for layer in (config.first_layer, config.last_layer))
        self._ends = tuple(
            dict.fromkeys(end.union(*(layers for layers in self._tied if end <= layers)) for end in ends)
        )
        self._prices: dict[tuple[Plan, int], Price] = {}
        self._shares: dict[tuple[object, ...], Array] = {}
        self._searched: set[tuple[Plan, int]] = set()  # plans whose `frontier` was searched

    def best(
        self, budget: float, progress: Progress = lambda done, total, best: None, effort: SearchEffort | None = None
    ) -> Result:
        """Return the plans with the most samples per second whose ranks need at most `budget` bytes.

        Uniform plans (one strategy, even stages) come first. A patient search prices all of them that could be the
        best, whatever the other limits of the effort. Plans with several strategies or uneven stages follow, within the
        limits of the effort, and last plans whose embed or head has another strategy than its neighbour.
        """
        effort = effort or self.effort
        begun, until = time.perf_counter(), now() + effort.seconds
        search_result = self._best(budget, effort, until, progress)
        best = (
            search_result.plans[0]
            if search_result.plans and not search_result.exact and search_result.gap > WORTH_MORE and effort.patient
            else None
        )
        # Searching the frontier of the best plan can price a faster plan: repeat until the best stays the same.
        while best is not None and now() < until:
            self.frontier(best, until=until)
            known = self._known(budget, effort).ranked
            search_result = replace(
                search_result, plans=known, bound=max(search_result.bound, *(one.images_per_second for one in known))
            )
            best = known[0] if known[0] is not best else None
        return replace(search_result, priced=len(self._prices), seconds=time.perf_counter() - begun)

    def _best(
        self,
        budget: float,
        effort: SearchEffort,
        until: float,
        progress: Progress = lambda done, total, best: None,
    ) -> Result:
        """Run one search over all outlines.

        until: value of `now` after which the search stops; a patient one only once it has found a plan
        """
        best_plans = self._known(budget, effort)
        outlines = [(self._ideal(outline), outline) for outline in self._outlines()]
        # Uniform plans first: they are few, and a good price early lets the bounds rule out most of the mixed plans.
        unpriced = self._uniform(outlines, budget, best_plans, progress, math.inf if effort.patient else until)
        # With several stages per rank the space contains only uniform plans, so these outlines are done.
        open_outlines = [(ideal, outline) for ideal, outline in outlines if outline.pipeline.virtual_stages == 1]
        least, exact = self._mixed(open_outlines, budget, best_plans, progress, effort, until)
        least, exact = min(least, unpriced), exact and unpriced >= best_plans.limit
        if effort.patient:
            self._free_ends(budget, best_plans, until)
        fastest = max((one.images_per_second for one in best_plans.plans), default=0.0)
        return Result(
            plans=best_plans.ranked,
            bound=max(fastest, 1 / least),
            exact=exact,
            outlines=len(outlines),
            priced=len(self._prices),
            strategies=self._options.strategies,
            seconds=0.0,
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
        seconds = min(3.0, self.effort.seconds)
        return replace(self.effort, tolerance=0.01, outlines=4, prices=4, nodes=400, seconds=seconds, patient=False)

    def _uniform(
        self,
        outlines: list[tuple[float, PlanOutline]],
        budget: float,
        best_plans: BestPlans,
        progress: Progress,
        until: float,
    ) -> float:
        """Price the uniform plans that fit and could be the best, and offer them to `best_plans`. Stop at `until`.

        Plans are priced in the order of their bounds, so none is priced that a bound rules out.

        Returns a lower bound on the seconds per image of the plans with several stages per rank that were not priced.
        """
        order = count()
        # (seconds per image at least, tie-breaker, outline, its strategies not yet tried). None stands for all of them:
        # their bounds are only computed once the outline's cheaper bound comes up.
        heap: list[tuple[float, int, PlanOutline, list[tuple[float, Groups]] | None]]
        heap = [(ideal, next(order), outline, None) for ideal, outline in outlines]
        heapq.heapify(heap)
        while heap and heap[0][0] < best_plans.limit and now() < until:
            _, _, outline, strategies = heapq.heappop(heap)
            if strategies is None:
                strategies = self._uniform_plans(outline, budget)
            else:
                _, layers = strategies.pop()
                plan = replace(outline.pipeline, layers=layers, microbatches=outline.microbatches)
                if self._fits(plan, outline.batch_size, budget):
                    best_plans.offer(self.price(plan, outline.batch_size))
                    progress(len(outlines) - len(heap), 2 * len(outlines), best_plans.plans[0])
            if strategies:
                bound = strategies[-1][0] / outline.batch_size
                heapq.heappush(heap, (bound, next(order), outline, strategies))
        return min((bound for bound, _, outline, _ in heap if outline.pipeline.virtual_stages > 1), default=math.inf)

    def _uniform_plans(self, outline: PlanOutline, budget: float) -> list[tuple[float, Groups]]:
        """Return (least seconds of a step, `Plan.layers`) of the uniform plans that may fit, fastest last."""
        choices, machine = self._uniform_options(outline), self.machine(outline, budget)
        if not choices.options:
            return []
        seconds, needs = uniform_bounds(outline, choices, self._sections, machine)
        fitting = np.nonzero(needs <= machine.budget)[0]
        slowest_first = fitting[np.argsort(-seconds[fitting], kind="stable")]
        return [(float(seconds[n]), self._layers(choices.options[n])) for n in slowest_first]

    def _layers(self, option: Option) -> Groups:
        """Return the strategies of all layers in a plan with one strategy, as `Plan.layers`."""
        if not option.sections:
            return (("*", option.strategy),)
        pairs = zip(self._sections.sections, option.sections, strict=True)
        return tuple((f"{section.blocks[0]}-{section.blocks[-1]}", strategy) for section, strategy in pairs)

    def _mixed(
        self,
        outlines: list[tuple[float, PlanOutline]],
        budget: float,
        best_plans: BestPlans,
        progress: Progress,
        effort: SearchEffort,
        until: float,
    ) -> tuple[float, bool]:
        """Price plans with several strategies or uneven stages, and offer them to `best_plans`.

        Returns (lower bound on the seconds per image of all `outlines`, whether no plan that could win was skipped).
        """
        order = count()
        # (seconds per image at least, tie-breaker, number of improvements of that bound, outline)
        heap = [(ideal, next(order), 0, outline) for ideal, outline in outlines]
        heapq.heapify(heap)
        exact, least, looked = True, math.inf, 0
        while heap:
            bound, _, sharp, outline = heapq.heappop(heap)
            late = now() > until and (best_plans.plans or not effort.patient)
            if bound >= best_plans.mixed_limit or late:
                least, exact = min(least, bound), exact and not late
                break
            # Tighter bounds cost more: compute them only when the cheaper bound is the lowest of all, and requeue.
            if sharp < 2:
                bound = max(bound, self._bound(outline, budget, best_plans.mixed_limit, quick=sharp == 0))
                if bound < math.inf:
                    heapq.heappush(heap, (bound, next(order), sharp + 1, outline))
                continue
            # The heap holds bounds only, and this is the lowest: it bounds this outline and all outlines behind it.
            least = min(least, bound)
            looked += 1
            if looked > effort.outlines and best_plans.plans:
                exact = False
                break
            progress(
                2 * len(outlines) - len(heap), 2 * len(outlines), best_plans.plans[0] if best_plans.plans else None
            )
            exact &= self._expansion(outline, budget, best_plans, effort, until).run()
        return least, exact

    def _expansion(
        self, outline: PlanOutline, budget: float, best_plans: BestPlans, effort: SearchEffort, until: float
    ) -> Expansion:
        """Return the search of one outline's plans that offers them to `best_plans`."""
        choices, machine, sections = self.options(outline), self.machine(outline, budget), self._sections

        def fits(plan: Plan, batch_size: int) -> bool:
            return self._fits(plan, batch_size, budget)

        def late() -> bool:
            return now() > until and (bool(best_plans.plans) or not effort.patient)

        def alike(plan: Plan) -> Iterator[Plan]:
            return with_tied_alike(plan, self.costs.config, self._tied)

        moves = self._moves(outline, machine)
        return Expansion(outline, choices, machine, sections, moves, alike, fits, self.price, best_plans, effort, late)

    def _free_ends(self, budget: float, best_plans: BestPlans, until: float) -> None:
        """Try other strategies for embed and head in the plans of `best_plans`, and offer it the faster ones."""
        for best in best_plans.plans[:ENDS]:
            pipeline = replace(best.plan, layers=Plan().layers, split="even", microbatches=None)
            outline = PlanOutline(pipeline, best.batch_size, best.plan.microbatches or 1)
            for layers in self._ends:
                for other in with_other_ends(best.plan, layers, self.options(outline), outline, self.costs.config):
                    if now() < until and self._fits(other, outline.batch_size, budget):
                        tried = self.price(other, outline.batch_size)
                        best = tried if tried.seconds < (1 - WORTH_OTHER_ENDS) * best.seconds else best
            best_plans.offer(best)

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

    def frontier(self, best: Price, points: int = 6, step: float = 0.7, until: float = math.inf) -> tuple[Price, ...]:
        """Return the fastest plans of the space for decreasing memory, `best` first.

        Each plan needs at most `step` times the memory of the one before. Short searches for these budgets add prices,
        once per plan; the plans are then chosen from all cached prices. If none needs that little, the plan with the
        least memory follows the best.

        points: number of plans at most
        until: value of `now` after which no search starts
        """
        key, budget, short = (best.plan, best.batch_size), best.memory_bytes, self._short
        for _ in range(0 if key in self._searched else points - 1):
            time_now = now()
            plans = (
                self._best(step * budget, short, min(until, time_now + short.seconds)).plans if time_now < until else ()
            )
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

    def memory_bytes(self, plan: Plan, batch_size: int) -> float:
        """Return the peak bytes of the fullest rank of a validated plan."""
        return memory_bytes(plan, self.costs, batch_size, self._moments)

    def _fits(self, plan: Plan, batch_size: int, budget: float) -> bool:
        if self._separates(plan):
            return False
        known = self._prices.get((plan, batch_size))
        return (known.memory_bytes if known else self.memory_bytes(plan, batch_size)) <= budget

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
        tokens = outline.rows * min(self._sections.takes) * costs.precision.compute.itemsize
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
        """Return the seconds of messages of `size` bytes between stages."""
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
