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
from vitpar.planner.search.bounds import Kind, Machine, ideal_seconds, least_seconds
from vitpar.planner.search.expand import Best, Effort, Expansion
from vitpar.planner.search.options import Option, Options
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan

Progress = Callable[[int, int, Price | None], None]
"""Called with (kinds done, kinds in all, the best so far)."""


@dataclass(frozen=True)
class Result:
    """What a search found.

    plans: the best first, of those within the tolerance the simplest, then the next best; none where nothing fits.
    bound: images a second that no plan with any mix of strategies exceeds. exact: whether all of the space was looked
    at or ruled out. kinds: pipelines with micro-batches. priced: plans. strategies: different ones of a layer. seconds:
    that the search took.
    """

    plans: tuple[Price, ...]
    bound: float
    exact: bool
    kinds: int
    priced: int
    strategies: int
    seconds: float

    @property
    def gap(self) -> float:
        """By how much a plan could be faster than the best at most, as a part of it."""
        if not (self.plans and self.bound):
            return 0.0
        return max(0.0, self.bound / self.plans[0].images_per_second - 1)


class Search:
    """Searches `space` for one model on one machine; profiles are looked up once for all budgets.

    moments: bytes that the optimizer keeps for every byte of parameters.
    """

    def __init__(self, space: Space, costs: LayerCosts, moments: float = 2, effort: Effort = Effort()) -> None:
        self.space, self.effort = space, effort
        self.costs, self._moments = costs, moments
        self._options = Options(space, costs, moments)
        self._prices: dict[tuple[Plan, int], Price] = {}

    def best(
        self, budget: float, progress: Progress = lambda done, total, best: None, effort: Effort | None = None
    ) -> Result:
        """The plans with the most images a second whose ranks need no more than `budget` bytes."""
        effort = effort or self.effort
        begun, order = time.perf_counter(), count()
        heap = [(self._ideal(kind), next(order), 0, kind) for kind in self._kinds()]
        heapq.heapify(heap)
        total, found, exact, least, looked = len(heap), Best(effort), True, math.inf, 0
        while heap:
            bound, _, sharp, kind = heapq.heappop(heap)
            late = time.perf_counter() - begun > effort.seconds and (found.plans or not effort.patient)
            if bound >= found.limit or late:
                least, exact = min(least, bound), exact and not late
                break
            if sharp < 2:  # dearer bounds only for those that cheap ones leave
                bound = max(bound, self._bound(kind, budget, quick=sharp == 0))
                if bound < math.inf:
                    heapq.heappush(heap, (bound, next(order), sharp + 1, kind))
                continue
            least = min(least, bound)
            looked += 1
            if looked > effort.kinds and found.plans:
                exact = False
                break
            progress(total - len(heap), total, found.plans[0] if found.plans else None)
            machine = self.machine(kind, budget)
            exact &= Expansion(kind, self.options(kind), machine, self.depth, self.price, budget, found, effort).run()
        seconds = time.perf_counter() - begun
        return Result(
            plans=found.ranked,
            bound=1 / least if least < math.inf else 0.0,
            exact=exact,
            kinds=total,
            priced=len(self._prices),
            strategies=self._options.strategies,
            seconds=seconds,
        )

    def frontier(self, best: Price, points: int = 6, step: float = 0.7) -> tuple[Price, ...]:
        """The best plans for less and less memory, `best` first: each needs at most `step` of what the one before
        needs. They are searched with less effort, seconds for each, among all plans that were ever priced."""
        rough = replace(
            self.effort, tolerance=0.01, kinds=4, prices=4, runs=4, seconds=min(3.0, self.effort.seconds), patient=False
        )
        budget = best.memory_bytes
        for _ in range(points - 1):
            plans = self.best(step * budget, effort=rough).plans
            if not plans:
                break
            budget = plans[0].memory_bytes
        found = [best]
        while len(found) < points:
            budget = step * found[-1].memory_bytes
            fitting = [price for price in self._prices.values() if price.memory_bytes <= budget]
            if not fitting:
                break
            found.append(max(fitting, key=lambda price: price.images_per_second))
        return tuple(found)

    def price(self, plan: Plan, batch_size: int) -> Price:
        """Of a validated plan, remembered."""
        key = plan, batch_size
        if key not in self._prices:
            self._prices[key] = price(plan, self.costs, batch_size, self._moments)
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
        size, at_once = self.space.ranks // pp, self.costs.at_once(self.space.ranks // pp)
        return Machine(
            alone=self.costs.crowd(1),
            sending=crowded(at_once, pp),
            speed=min(1.0, at_once),
            lanes=min(at_once, pp),
            overhead=self.costs.model.microbatch
            * max(self.costs.crowd(size), self.costs.crowd(1) * kind.pipeline.num_stages / min(at_once, pp)),
            budget=budget - self.costs.hardware.reserved_bytes,
        )

    def _ideal(self, kind: Kind) -> float:
        """Seconds an image, were all layers computed at the highest rate and nothing sent."""
        machine = self.machine(kind, math.inf)
        return ideal_seconds(kind, self._options.least_work(kind.pipeline), self.depth, machine) / kind.batch_size

    def _bound(self, kind: Kind, budget: float, quick: bool) -> float:
        """The same for the strategies there are."""
        return (
            least_seconds(kind, self.options(kind), self.depth, self.machine(kind, budget), quick=quick)
            / kind.batch_size
        )

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return self.space.config.depth
