"""How speed grows with devices: the best plan for every number of them, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space

Kind = Literal["weak", "strong"]


@dataclass(frozen=True)
class Point:
    """The best plan on `ranks` devices; None where nothing fits into memory or divides."""

    ranks: int
    batch_size: int
    price: Price | None

    @property
    def per_rank(self) -> float:
        """Images a second of a device, 0 without a plan."""
        return self.price.images_per_second / self.ranks if self.price else 0.0


def scaling(
    kind: Kind,
    batch_size: int,
    ranks: Sequence[int],
    space: Callable[[int, int], Space],
    costs: Callable[[int], LayerCosts],
    budget: Callable[[LayerCosts], float],
    moments: float = 2,
) -> Iterator[Point]:
    """A point for each of `ranks`, which rise.

    strong: `batch_size` images a step on any number of devices. weak: on the most devices, and fewer in proportion.
    space: of so many ranks and images. costs: of so many ranks. budget: bytes of a rank.
    """
    for number in ranks:
        images = batch_size if kind == "strong" else batch_size * number // max(ranks)
        found = costs(number)
        plans = Search(space(number, images), found, moments).best(budget(found)).plans
        yield Point(number, images, plans[0] if plans else None)


def efficiency(points: Sequence[Point]) -> list[float | None]:
    """Of each point: images a second of a device, beside the fewest devices that a plan was found for."""
    first = next((point.per_rank for point in points if point.price), None)
    return [point.per_rank / first if first and point.price else None for point in points]
