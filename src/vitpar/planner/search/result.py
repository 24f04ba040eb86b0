"""Outcome of a search."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from vitpar.planner.cost.price import Price, plan_title
from vitpar.runs.pages.document import table
from vitpar.text import size


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
