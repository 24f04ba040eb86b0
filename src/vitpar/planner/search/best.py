"""Search over outlines, each with a dynamic programme.

An outline is a pipeline with a batch size and a number of micro-batches.

1. Uniform plans (one strategy, even stages) are priced in the order of their bounds (`bounds`), until no bound beats
   the best price.
2. Outlines are visited in the order of bounds that hold for any mix of strategies (`relaxed`). In each, the prices of
   some uniform plans scale the table of least costs, and a dynamic programme (`dynamic`) finds the fastest mix of these
   strategies and split into stages, which is priced.
3. The best plans are changed in one place as long as their price falls (`mixing`).

`Result.bound` is the lowest bound of an outline. The search is no proof that its choice is the best plan.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price
from vitpar.planner.search.bounds import PlanOutline, uniform_bounds
from vitpar.planner.search.costed import CostedSpace
from vitpar.planner.search.mixing import Mixer
from vitpar.planner.search.ranking import BestPlans, Result, SearchEffort
from vitpar.planner.search.space import Space
from vitpar.strategy.selectors import Groups

now = time.thread_time
"""Clock of the limits, in seconds: on a busy machine a search takes longer, and finds the same."""
Progress = Callable[[int, int, Price | None], None]
"""Progress callback: (steps done, total steps, best price so far or None)."""


class Search(CostedSpace):
    """Search of one space of plans. Prices are cached across calls and budgets.

    effort: default limits of the search
    """

    def __init__(
        self, space: Space, costs: LayerCosts, moments: float = 2, effort: SearchEffort = SearchEffort()
    ) -> None:
        super().__init__(space, costs, moments)
        self.effort = effort

    def best(
        self, budget: float, progress: Progress = lambda done, total, best: None, effort: SearchEffort | None = None
    ) -> Result:
        """Return the plans with the most samples per second whose ranks need at most `budget` bytes."""
        effort, begun = effort or self.effort, time.perf_counter()
        until, best_plans = now() + effort.seconds, self._known(budget, effort)
        outlines = self._ideals
        unpriced = self._uniform(outlines, budget, best_plans, progress, math.inf if effort.patient else until)
        # With several stages per rank the space contains only uniform plans, so these outlines are done.
        open_outlines = [(ideal, outline) for ideal, outline in outlines if outline.pipeline.virtual_stages == 1]
        mixer = Mixer(self, budget, best_plans, effort)
        least = min(unpriced, self._mixed(open_outlines, budget, mixer, progress, until))
        mixer.improve_best(least)
        fastest = max((one.images_per_second for one in best_plans.plans), default=0.0)
        bound = float(max(fastest, 1 / least))
        return Result(
            plans=best_plans.ranked,
            bound=bound,
            exact=bound <= (1 + effort.tolerance) * fastest,
            outlines=len(outlines),
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
    def short(self) -> SearchEffort:
        """Limits of the searches for other budgets, whose plans are alternatives."""
        seconds = min(3.0, self.effort.seconds)
        return replace(
            self.effort, tolerance=0.01, outlines=10, mixes=2, sets=1, changes=0, seconds=seconds, patient=False
        )

    def _uniform(
        self,
        outlines: list[tuple[float, PlanOutline]],
        budget: float,
        best_plans: BestPlans,
        progress: Progress,
        until: float,
    ) -> float:
        """Price uniform plans of all outlines in the order of their bounds, and offer them to `best_plans`.

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
                if self.fits(plan, outline.batch_size, budget):
                    best_plans.offer(self.price(plan, outline.batch_size))
                    progress(len(outlines) - len(heap), 2 * len(outlines), best_plans.plans[0])
            if strategies:
                bound = strategies[-1][0] / outline.batch_size
                heapq.heappush(heap, (bound, next(order), outline, strategies))
        return min((bound for bound, _, outline, _ in heap if outline.pipeline.virtual_stages > 1), default=math.inf)

    def _uniform_plans(self, outline: PlanOutline, budget: float) -> list[tuple[float, Groups]]:
        """Return (least seconds of a step, `Plan.layers`) of the uniform plans that may fit, fastest last."""
        choices, machine = self.uniform_options(outline), self.machine(outline, budget)
        if not choices.strategies:
            return []
        seconds, needs = uniform_bounds(outline, choices, self.sections, machine)
        fitting = np.nonzero(needs <= machine.budget)[0]
        slowest_first = fitting[np.argsort(-seconds[fitting], kind="stable")]
        return [(float(seconds[n]), self.layers(choices.strategies[n])) for n in slowest_first]

    def _mixed(
        self,
        outlines: list[tuple[float, PlanOutline]],
        budget: float,
        mixer: Mixer,
        progress: Progress,
        until: float,
    ) -> float:
        """Let `mixer` price plans with several strategies or uneven stages.

        Returns a lower bound on the seconds per image of all `outlines`.
        """
        order, least, looked, best_plans, effort = count(), math.inf, 0, mixer.best_plans, mixer.effort
        # (seconds per image at least, tie-breaker, number of improvements of that bound, outline)
        heap = [(ideal, next(order), 0, outline) for ideal, outline in outlines]
        heapq.heapify(heap)
        while heap and looked < effort.outlines:
            bound, _, sharp, outline = heapq.heappop(heap)
            late = now() > until and (best_plans.plans or not effort.patient)
            if bound >= best_plans.mixed_limit or late:
                return min(least, bound)
            # Tighter bounds cost more: compute them only when the cheaper bound is the lowest of all, and requeue.
            if sharp < 2:
                bound = max(bound, self._bound(outline, budget, best_plans.mixed_limit, quick=sharp == 0))
                if bound < math.inf:
                    heapq.heappush(heap, (bound, next(order), sharp + 1, outline))
                continue
            # The heap holds bounds only, and this is the lowest: it bounds this outline and all outlines behind it.
            least, looked = min(least, bound), looked + 1
            best = best_plans.plans[0] if best_plans.plans else None
            progress(2 * len(outlines) - len(heap), 2 * len(outlines), best)
            mixer.mix(outline)
        return least

    def frontier(self, best: Price, points: int = 6, step: float = 0.7) -> tuple[Price, ...]:
        """Return the fastest plans of the space for decreasing memory, `best` first.

        Each plan needs at most `step` times the memory of the one before. Short searches for these budgets add prices;
        the plans are then chosen from all cached prices. If none needs that little, the plan with the
        least memory follows the best.

        points: number of plans at most
        """
        budget = best.memory_bytes
        for _ in range(points - 1):
            plans = self.best(step * budget, effort=self.short).plans
            if not plans:
                break
            budget = plans[0].memory_bytes
        # Choose from all prices only now: a search for a smaller budget may have found the fastest for a larger one.
        # Uniform plans may be priced without being in the space (`reasons`).
        known = [one for one in self._prices.values() if not one.plan.is_uniform or self.space.covers(one.plan)]
        known = [one for one in known if one.images_per_second <= (1 + self.effort.tolerance) * best.images_per_second]
        prices = [best]
        while len(prices) < points:
            fitting = [one for one in known if one.memory_bytes <= step * prices[-1].memory_bytes]
            if not fitting:
                break
            fastest = max(one.images_per_second for one in fitting)
            close = [one for one in fitting if one.images_per_second >= (1 - self.effort.simpler) * fastest]
            prices.append(min(close, key=lambda one: (len(one.plan.layers), -one.images_per_second)))
        if len(prices) == 1:
            least = min(known, key=lambda one: one.memory_bytes, default=best)
            prices += [least] if least.memory_bytes < best.memory_bytes else []
        return tuple(prices)
