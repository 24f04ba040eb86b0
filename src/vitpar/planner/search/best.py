"""The search: the most promising kind of plan first, until nothing left can be better than what was found.

Every kind has a bound that holds for any mix of strategies (`bounds`). Within a kind the plans of `space` are taken in
the order of bounds of their own, and only those are priced whose bound is below the best price so far. So what is found
is the best of the space, unless `SearchEffort` cut a kind short; then `Result.exact` says so, and `Result.bound` still
holds.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self

import numpy as np

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, crowded, memory_bytes, norm_seconds, price, travel_seconds
from vitpar.planner.search.bounds import Kind, Machine, ideal_seconds, uniform_bounds
from vitpar.planner.search.expand import BestPlans, Expansion, SearchEffort
from vitpar.planner.search.options import Choices, Options
from vitpar.planner.search.relaxed import STEPS, least_seconds, split_seconds
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, Strategy

ROUNDING = 1e-9
WORTH_MORE = 0.01
"""The gap from which on a search that is not exact looks again."""
FEWER: tuple[dict[str, tuple[str, ...]], ...] = (
    {"flags": ()},
    {"flags": ("ckpt",)},
    {"roles": ("pp", "dp")},
    {"roles": ("pp", "dp", "fsdp")},
    {"schedules": ("1f1b",)},
)
"""Restricted spaces that are searched separately: with fewer strategies the same effort reaches further."""
Progress = Callable[[int, int, Price | None], None]
"""Called with (kinds done, kinds in all, the best so far)."""


@dataclass(frozen=True)
class Result:
    """Outcome of a search."""

    plans: tuple[Price, ...]
    """Plans, best first: the simplest of those within the tolerance, then the next best. Empty where nothing fits."""
    bound: float
    """Images per second that no plan with any mix of strategies exceeds."""
    exact: bool
    """Whether the complete space was priced or ruled out."""
    kinds: int
    """Number of pipelines with micro-batches."""
    priced: int
    """Number of plans that were priced."""
    strategies: int
    """Number of different strategies of a layer."""
    seconds: float
    """Duration of the search."""

    @property
    def gap(self) -> float:
        """By how much a plan could be faster than the best at most, as a part of it."""
        if not (self.plans and self.bound):
            return 0.0
        return max(0.0, self.bound / self.plans[0].images_per_second - 1)

    def with_alternatives(self, prices: Iterable[Price]) -> Self:
        """Return a copy with more plans among the next best."""
        best, *others = self.plans
        known = {(price.plan, price.batch_size) for price in self.plans}
        others += [price for price in prices if (price.plan, price.batch_size) not in known]
        return replace(self, plans=(best, *sorted(others, key=lambda price: -price.images_per_second)))


class Search:
    """Searches `space` for one model on one machine; profiles are looked up once for all budgets.

    moments: bytes that the optimizer keeps for every byte of parameters.
    """

    def __init__(
        self, space: Space, costs: LayerCosts, moments: float = 2, effort: SearchEffort = SearchEffort()
    ) -> None:
        self.space, self.effort = space, effort
        self.costs, self._moments = costs, moments
        self._options = Options(space, costs, moments)
        self._prices: dict[tuple[Plan, int], Price] = {}
        self._frontiers: dict[tuple[Plan, int], tuple[Price, ...]] = {}

    def best(
        self, budget: float, progress: Progress = lambda done, total, best: None, effort: SearchEffort | None = None
    ) -> Result:
        """The plans with the most images a second whose ranks need no more than `budget` bytes.

        Plans with one strategy come first, all that could be the best, whatever the effort. Then those of several
        strategies or uneven stages, as far as the effort goes. Where that is not far enough to rule out plans that are
        faster by more than a hundredth, it looks again (`_again`).
        """
        effort = effort or self.effort
        begun = time.perf_counter()
        until = begun + effort.seconds
        found = self._best(budget, effort, until, progress)
        if not found.exact and found.gap > WORTH_MORE and effort.patient:
            found = self._again(found, budget, effort, until)
        return replace(found, priced=len(self._prices), seconds=time.perf_counter() - begun)

    def _again(self, found: Result, budget: float, effort: SearchEffort, until: float) -> Result:
        """Return `found` with what other searches found that fits: with fewer strategies to choose from, and short ones
        for less memory, those of the frontier among them."""
        for fewer in FEWER:
            if time.perf_counter() > until:
                break
            part = copy(self)  # with the same prices
            part.space = _part(self.space, fewer)
            part._options = Options(part.space, self.costs, self._moments)
            part._best(budget, effort, until)
        for smaller in _smaller(budget):
            if time.perf_counter() > until:
                break
            self._best(smaller, self._short, until)
        best = None
        while (known := self._known(budget, effort)).plans and known.plans[0] is not best:
            best = known.plans[0]
            self.frontier(known.ranked[0], until=until)
        fastest = max((price.images_per_second for price in known.plans), default=0.0)
        return replace(found, plans=known.ranked, bound=max(found.bound, fastest))

    def _best(
        self,
        budget: float,
        effort: SearchEffort,
        until: float,
        progress: Progress = lambda done, total, best: None,
    ) -> Result:
        """One search. until: when it ends, by `time.perf_counter`, once a plan is found."""
        begun, found = time.perf_counter(), self._known(budget, effort)
        kinds = [(self._ideal(kind), kind) for kind in self._kinds()]
        self._uniform(kinds, budget, found, progress, math.inf if effort.patient else until)
        # With several stages a rank the space has nothing but plans with one strategy.
        open_kinds = [(ideal, kind) for ideal, kind in kinds if kind.pipeline.virtual_stages == 1]
        least, exact = self._mixed(open_kinds, budget, found, progress, effort, until)
        fastest = max((price.images_per_second for price in found.plans), default=0.0)
        return Result(
            plans=found.ranked,
            bound=max(fastest, 1 / least),
            exact=exact,
            kinds=len(kinds),
            priced=len(self._prices),
            strategies=self._options.strategies,
            seconds=time.perf_counter() - begun,
        )

    def _known(self, budget: float, effort: SearchEffort) -> BestPlans:
        """The best of all plans that were ever priced."""
        found = BestPlans(effort)
        for known in self._prices.values():
            if known.memory_bytes <= budget:
                found.offer(known)
        return found

    @property
    def _short(self) -> SearchEffort:
        """Effort for plans that only serve as alternatives."""
        seconds = min(3.0, self.effort.seconds)
        return replace(
            self.effort, tolerance=0.01, kinds=4, prices=4, nodes=400, runs=4, seconds=seconds, patient=False
        )

    def _uniform(
        self, kinds: list[tuple[float, Kind]], budget: float, found: BestPlans, progress: Progress, until: float
    ) -> None:
        """Offer every plan with one strategy and even stages that fits and could be the best, or those up to `until`.

        Each comes up when nothing has a lower bound, so that none is priced that a bound rules out.
        """
        order = count()
        heap: list[tuple[float, int, Kind, list[tuple[float, Strategy]] | None]]
        heap = [(ideal, next(order), kind, None) for ideal, kind in kinds]
        heapq.heapify(heap)
        while heap and heap[0][0] < found.limit and time.perf_counter() < until:
            _, _, kind, strategies = heapq.heappop(heap)
            if strategies is None:
                strategies = self._uniform_plans(kind, budget)
            else:
                _, strategy = strategies.pop()
                plan = replace(kind.pipeline, layers=(("*", strategy),), microbatches=kind.microbatches)
                if self._fits(plan, kind.batch_size, budget):
                    found.offer(self.price(plan, kind.batch_size))
                    progress(len(kinds) - len(heap), 2 * len(kinds), found.plans[0])
            if strategies:
                bound = strategies[-1][0] / kind.batch_size
                heapq.heappush(heap, (bound, next(order), kind, strategies))

    def _uniform_plans(self, kind: Kind, budget: float) -> list[tuple[float, Strategy]]:
        """Strategies for all layers that may fit, and the seconds of a step that each takes at least; the quickest
        last."""
        choices, machine = self.options(kind), self.machine(kind, budget)
        if not choices.options:
            return []
        seconds, needs = uniform_bounds(kind, choices, self.depth, machine)
        fitting = np.nonzero(needs <= machine.budget)[0]
        slowest_first = fitting[np.argsort(-seconds[fitting], kind="stable")]
        return [(float(seconds[n]), choices.options[n].strategy) for n in slowest_first]

    def _mixed(
        self,
        kinds: list[tuple[float, Kind]],
        budget: float,
        found: BestPlans,
        progress: Progress,
        effort: SearchEffort,
        until: float,
    ) -> tuple[float, bool]:
        """Offer plans of several strategies and of uneven stages. Returns the seconds an image that nothing is faster
        than, and whether everything was looked at that could be."""
        order = count()
        heap = [(ideal, next(order), 0, kind) for ideal, kind in kinds]
        heapq.heapify(heap)
        exact, least, looked = True, math.inf, 0
        while heap:
            bound, _, sharp, kind = heapq.heappop(heap)
            late = time.perf_counter() > until and (found.plans or not effort.patient)
            if bound >= found.limit or late:
                least, exact = min(least, bound), exact and not late
                break
            if sharp < 2:  # dearer bounds only for those that cheap ones leave
                bound = max(bound, self._bound(kind, budget, found.limit, quick=sharp == 0))
                if bound < math.inf:
                    heapq.heappush(heap, (bound, next(order), sharp + 1, kind))
                continue
            least = min(least, bound)
            looked += 1
            if looked > effort.kinds and found.plans:
                exact = False
                break
            progress(2 * len(kinds) - len(heap), 2 * len(kinds), found.plans[0] if found.plans else None)
            exact &= Expansion(
                kind,
                self.options(kind),
                self.machine(kind, budget),
                self.depth,
                lambda plan, batch_size: self._fits(plan, batch_size, budget),
                self.price,
                found,
                effort,
            ).run()
        return least, exact

    def frontier(self, best: Price, points: int = 6, step: float = 0.7, until: float = math.inf) -> tuple[Price, ...]:
        """The best plans for less and less memory, `best` first: each needs at most `step` of what the one before
        needs. They are searched with less effort, seconds for each, among all plans that were ever priced.

        until: when nothing more is searched, by `time.perf_counter`. What was found for a plan is remembered."""
        key = best.plan, best.batch_size
        if key in self._frontiers:
            return self._frontiers[key]
        budget, short = best.memory_bytes, self._short
        for _ in range(points - 1):
            now = time.perf_counter()
            plans = self._best(step * budget, short, min(until, now + short.seconds)).plans if now < until else ()
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
        self._frontiers[key] = tuple(found)
        return self._frontiers[key]

    def price(self, plan: Plan, batch_size: int) -> Price:
        """Return the price of a validated plan, cached."""
        key = plan, batch_size
        if key not in self._prices:
            self._prices[key] = self._price(plan, batch_size)
        return self._prices[key]

    def _price(self, plan: Plan, batch_size: int) -> Price:
        return price(plan, self.costs, batch_size, self._moments)

    def memory_bytes(self, plan: Plan, batch_size: int) -> float:
        """Bytes of the fullest rank of a validated plan."""
        return memory_bytes(plan, self.costs, batch_size, self._moments)

    def _fits(self, plan: Plan, batch_size: int, budget: float) -> bool:
        known = self._prices.get((plan, batch_size))
        return (known.memory_bytes if known else self.memory_bytes(plan, batch_size)) <= budget

    def _kinds(self) -> Iterator[Kind]:
        for batch_size in self.space.batch_sizes:
            for pipeline in self.space.pipelines():
                for microbatches in self.space.microbatches(pipeline, batch_size):
                    yield Kind(pipeline, batch_size, microbatches)

    def options(self, kind: Kind) -> Choices:
        """The strategies worth looking at in plans of a kind."""
        return self._options.of(kind.pipeline, kind.rows)

    def machine(self, kind: Kind, budget: float) -> Machine:
        """The rates of a rank in plans of a kind."""
        costs, config, pipeline = self.costs, self.space.config, kind.pipeline
        pp = pipeline.pipeline_degree
        size, at_once = self.space.ranks // pp, costs.at_once(self.space.ranks // pp)
        speed, sending = min(1.0, at_once), crowded(at_once, pp)
        overlap = costs.hardware.overlap
        tokens = kind.rows * config.tokens * config.embed_dim * costs.precision.compute.itemsize
        return Machine(
            alone=costs.crowd(1),
            sending=sending,
            speed=speed,
            lanes=min(at_once, pp),
            overhead=costs.model.microbatch * costs.crowd(size),
            action=(costs.model.microbatch / 2 * costs.crowd(1) + costs.hardware.pipeline * sending) / speed,
            norm=norm_seconds(costs, self.space.ranks),
            overlap=(overlap.compute, overlap.communication) if overlap else (1.0, 1.0),
            send=lambda share: travel_seconds(costs, size, share * tokens) if pp > 1 else 0.0,
            # Bounds add the same bytes up in another order than prices do.
            budget=(1 + ROUNDING) * (budget - costs.hardware.reserved_bytes),
            images=kind.batch_size * config.channels * config.image_size**2 * costs.precision.compute.itemsize,
            tokens=tokens,
        )

    def _ideal(self, kind: Kind) -> float:
        """Seconds an image, were all layers computed at the highest rate and nothing sent."""
        machine = self.machine(kind, math.inf)
        return (
            ideal_seconds(kind, self._options.least_work(kind.pipeline, kind.rows), self.depth, machine)
            / kind.batch_size
        )

    def _bound(self, kind: Kind, budget: float, limit: float, quick: bool) -> float:
        """Return the bound over the available strategies.

        limit: stop as soon as the bound is known to be this high.
        """
        machine, enough = self.machine(kind, budget), limit * kind.batch_size
        steps = 0 if quick else STEPS
        found = least_seconds(kind, self.options(kind), self.depth, machine, steps=steps, enough=enough)
        if kind.pipeline.pipeline_degree > 1 and not quick and found < enough:
            found = max(found, split_seconds(kind, self.options(kind), self.depth, machine, enough))
        return found / kind.batch_size

    @property
    def depth(self) -> int:
        """Blocks of the model."""
        return self.space.config.depth


def _smaller(budget: float) -> list[float]:
    """Budgets below `budget` down to an eighth. They are powers of 2 ** 0.5, so that searches with slightly different
    budgets take the same ones."""
    if not 1 < budget < math.inf:
        return []
    last = math.ceil(2 * math.log2(budget)) - 1
    return [2 ** (step / 2) for step in range(last - 5, last + 1)]


def _part(space: Space, fewer: Mapping[str, tuple[str, ...]]) -> Space:
    """The part of a space that has nothing but `fewer`."""
    kept: dict[str, Any] = {
        name: tuple(one for one in getattr(space, name) if one in some) for name, some in fewer.items()
    }
    return replace(space, **kept)
