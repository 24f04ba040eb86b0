"""Predicted scaling: the best plan for each number of devices, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitpar.errors import PlannerError
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar.planner.training_time import TrainingLength, TrainingTime, training_time

Regime = Literal["weak", "strong"]
"""Scaling regime: whether the batch size grows with the number of devices, or is fixed."""


@dataclass(frozen=True)
class Point:
    """The best plan on one number of devices."""

    ranks: int
    """Number of devices."""
    batch_size: int
    """Global images per step."""
    price: Price | None
    """Price of the best plan; None if no plan fits into memory or divides the model and the batch."""
    gap: float = 0.0
    """`Result.gap` of the search."""
    training: TrainingTime | None = None
    """The complete training under the conditions of the cluster; None if these are unknown."""

    @property
    def per_rank(self) -> float:
        """Images per second per device; 0 without a plan."""
        return self.price.images_per_second / self.ranks if self.price else 0.0


def images(regime: Regime, batch_size: int, ranks: int, most: int) -> int:
    """Return the global batch size on `ranks` devices.

    With strong scaling it is always `batch_size`. With weak scaling it is proportional to `ranks`: `batch_size` on
    `most` devices. Raises PlannerError if that is not an integer.
    """
    if regime == "strong":
        return batch_size
    if batch_size * ranks % most:
        raise PlannerError(
            f"a batch of {batch_size} on {most} ranks does not scale to a whole number of samples on {ranks}: use a "
            f"--batch-size divisible by {most}"
        )
    return batch_size * ranks // most


def best_on(
    ranks: int,
    batch_size: int,
    space: Space,
    costs: LayerCosts,
    budget: float,
    moments: float = 2,
    length: TrainingLength | None = None,
) -> Point:
    """Return the best plan of `space` on `ranks` devices.

    budget: bytes of memory per device
    moments: bytes of optimizer state per byte of parameters
    length: of the complete training, under the conditions of the cluster; None if these are unknown
    """
    search_result = Search(space, costs, moments).best(budget)
    best = search_result.plans[0] if search_result.plans else None
    training = training_time(best, length) if best and length else None
    return Point(ranks, batch_size, best, search_result.gap, training)


def efficiency(points: Sequence[Point]) -> list[float | None]:
    """Return the scaling efficiency of each point; None for points without a plan.

    It is images per second per device, relative to the first point with a plan.

    points: smallest number of devices first
    """
    first = next((point.per_rank for point in points if point.price), None)
    return [point.per_rank / first if first and point.price else None for point in points]
