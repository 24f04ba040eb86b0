"""Searches without limits, compared with the best plan of the space."""

from vitpar.planner.cost.price import Price
from vitpar.planner.search.ranking import SearchEffort

EVERYTHING = SearchEffort(tolerance=0.0, simpler=0.0, outlines=10**9, prices=10**9, nodes=10**9, seconds=10**9)
"""Effort of a search that looks at every plan."""


def assert_as_fast(found: Price, best: Price) -> None:
    """Check that a search found a plan as fast as the best of the space; faster only with another embed or head."""
    speed, plans = found.images_per_second / best.images_per_second, (str(best.plan), str(found.plan))
    assert speed >= 1 - 1e-9, plans
    assert speed <= 1 + 1e-9 or {"embed", "head"} & {selector for selector, _ in found.plan.layers}, plans
