"""Limits of a search, the best plans that it found so far, and its outcome."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from vitpar.planner.cost.price import Price, plan_title
from vitpar.runs.pages.document import table
from vitpar.text import size


@dataclass(frozen=True)
class SearchEffort:
    """Limits of a search. Uniform plans (one strategy, even stages) are limited only by `seconds`, unless `patient`."""

    tolerance: float = 1e-3
    """Relative speedup over the chosen plan that an exact search may miss."""
    simpler: float = 0.01
    """Relative speed that is given up for fewer strategies: predictions do not order plans that close."""
    outlines: int = 40
    """Outlines in which strategies are mixed at most."""
    mixes: int = 8
    """Mixes to make at most until one fits into memory, per outline."""
    sets: int = 8
    """Sets of strategies to mix at most, per outline: all good ones, then few of them, and single ones."""
    changes: int = 40
    """Changes of the best plan to price at most; fewer of a plan with many micro-batches and stages."""
    alternatives: int = 10
    """Plans to keep besides the best."""
    seconds: float = 20.0
    """Duration of the search at most."""
    patient: bool = True
    """Whether to exceed `seconds` until all uniform plans are done and a plan is found."""


class BestPlans:
    """The best prices so far, one per `form`.

    plans: fastest first
    plain: the fastest with one strategy for all layers; None if there is none
    """

    def __init__(self, effort: SearchEffort) -> None:
        self.plans: list[Price] = []
        self.plain: Price | None = None
        self._of_form = dict[tuple[object, ...], Price]()
        # Half of the tolerance is for ruling out plans, half for preferring a simple plan (`ranked`): together they
        # stay within it.
        self._most, self._tolerance, self._simpler = 1 + effort.alternatives, effort.tolerance / 2, effort.simpler

    @property
    def limit(self) -> float:
        """Seconds per image from which on a plan is not better than the best by more than the tolerance."""
        return (1 - self._tolerance) / self.plans[0].images_per_second if self.plans else math.inf

    @property
    def mixed_limit(self) -> float:
        """Seconds per image from which on a plan with several strategies would not be chosen (`ranked`)."""
        plain = (1 - self._simpler) / self.plain.images_per_second if self.plain else math.inf
        return min(self.limit, plain)

    def offer(self, price: Price) -> None:
        """Add the price of a plan that fits into memory, if it is the fastest of its form."""
        if len(price.plan.distinct) == 1 and (not self.plain or price.images_per_second > self.plain.images_per_second):
            self.plain = price
        mine = form(price)
        if mine in self._of_form and self._of_form[mine].images_per_second >= price.images_per_second:
            return
        self._of_form[mine] = price
        self.plans = sorted(self._of_form.values(), key=lambda p: -p.images_per_second)

    @property
    def ranked(self) -> tuple[Price, ...]:
        """The plan to choose, then other plans, fastest first.

        The first has the fewest strategies of all that are nearly as fast as the fastest (`SearchEffort.simpler`), and
        among the fastest of those, within the tolerance, the fewest micro-batches and the least memory. The others are
        those without a plan of fewer strategies that is nearly as fast.
        """
        if not self.plans:
            return ()
        every = [*self.plans[: self._most], *([self.plain] if self.plain else [])]
        near = [p for p in every if p.images_per_second >= (1 - self._simpler) * self.plans[0].images_per_second]
        fewest = min(len(p.plan.distinct) for p in near)
        simple = [p for p in near if len(p.plan.distinct) == fewest]
        enough = (1 - self._tolerance) * max(p.images_per_second for p in simple)
        alike = [p for p in simple if p.images_per_second >= enough]
        first = min(alike, key=lambda p: (p.plan.microbatches or 1, p.memory_bytes))
        others, fastest = list[Price](), dict[tuple[int, int], float]()  # by batch size and number of strategies
        for one in sorted(self.plans, key=lambda p: len(p.plan.distinct)):
            batch_size, number = one.batch_size, len(one.plan.distinct)
            simpler = [fastest.get((batch_size, fewer), 0.0) for fewer in range(number)]
            if (1 - self._simpler) * one.images_per_second > max(simpler):
                others.append(one)
            fastest[batch_size, number] = max(one.images_per_second, fastest.get((batch_size, number), 0.0))
        others.sort(key=lambda p: -p.images_per_second)
        return first, *[one for one in others if one is not first][: self._most - 1]


def form(price: Price) -> tuple:
    """Return a key that is equal for plans that differ only in the split and in where strategies change."""
    plan = price.plan
    return plan.pp, plan.schedule, plan.virtual_stages, frozenset(plan.distinct), plan.microbatches, price.batch_size


@dataclass(frozen=True, repr=False)
class Result:
    """Outcome of a search. Its repr lists the plans."""

    plans: tuple[Price, ...]
    """Prices, best first: the simplest plan within the tolerance of the fastest, then the others by images per second.
    Empty if no plan fits into memory."""
    bound: float
    """Images per second that no plan of the space exceeds, with any mix of strategies."""
    exact: bool
    """Whether `bound` is within the tolerance of the fastest plan that was found."""
    outlines: int
    """Number of outlines: combinations of pipeline, batch size and number of micro-batches."""
    priced: int
    """Number of plans priced by this `Search` so far."""
    strategies: int
    """Number of layer strategies costed, counted per pipeline degree that a cheap bound does not rule out."""
    seconds: float
    """Duration of the search in seconds."""

    @property
    def gap(self) -> float:
        """Largest possible relative speedup over the best plan: `bound` / its images per second - 1."""
        if not (self.plans and self.bound):
            return 0.0
        return max(0.0, self.bound / self.plans[0].images_per_second - 1)

    def with_alternatives(self, prices: Iterable[Price]) -> Self:
        """Return a copy with `prices` added to the plans after the best; duplicates are dropped."""
        best, *others = self.plans
        known = {(price.plan, price.batch_size) for price in self.plans}
        others += [price for price in prices if (price.plan, price.batch_size) not in known]
        return replace(self, plans=(best, *sorted(others, key=lambda price: -price.images_per_second)))

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.plans))

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows = [
            (plan_title(one.plan), f"{one.batch_size:,}", f"{one.images_per_second:,.0f}", size(one.memory_bytes))
            for one in self.plans
        ]
        return table(("plan", "batch", "samples/s", "memory per rank"), rows, numbers=slice(1, None))
