"""How speed grows with devices: the best plan for every number of them, by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitpar.errors import PlannerError
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space

Kind = Literal["weak", "strong"]


@dataclass(frozen=True)
class Point:
    """The best plan on `ranks` devices; None where nothing fits into memory or divides. gap: as in `Result`."""

    ranks: int
    batch_size: int
    price: Price | None
    gap: float = 0.0

    @property
    def per_rank(self) -> float:
        """Images a second of a device, 0 without a plan."""
        return self.price.images_per_second / self.ranks if self.price else 0.0


def images(kind: Kind, batch_size: int, ranks: int, most: int) -> int:
    """Return the images of a step on `ranks` devices: `batch_size` on any number (strong scaling), or on `most` and
    proportionally fewer (weak scaling).

    Raises PlannerError where that is not a whole number.
    """
    if kind == "strong":
        return batch_size
    if batch_size * ranks % most:
        raise PlannerError(
            f"a batch of {batch_size} on {most} ranks does not scale to a whole number of images on {ranks}: use a "
            f"--batch-size divisible by {most}"
        )
    return batch_size * ranks // most


def best_on(ranks: int, batch_size: int, space: Space, costs: LayerCosts, budget: float, moments: float = 2) -> Point:
    """The best plan of `space` on so many devices, of `budget` bytes each."""
    found = Search(space, costs, moments).best(budget)
    return Point(ranks, batch_size, found.plans[0] if found.plans else None, found.gap)


def efficiency(points: Sequence[Point]) -> list[float | None]:
    """Return the scaling efficiency of each point: images per second per device, relative to the smallest number of
    devices with a plan."""
    first = next((point.per_rank for point in points if point.price), None)
    return [point.per_rank / first if first and point.price else None for point in points]
