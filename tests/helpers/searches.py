"""Searches without limits, compared with the best plan of the space."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from vitpar.planner.cost.price import Price, price
from vitpar.planner.search.best import Search
from vitpar.planner.search.bounds import uniform_bounds
from vitpar.planner.search.ranking import SearchEffort
from vitpar.strategy import Strategy

EVERYTHING = SearchEffort(tolerance=0.0, simpler=0.0, outlines=10**9, prices=10**9, nodes=10**9, seconds=10**9)
"""Effort of a search that looks at every plan."""


def assert_as_fast(found: Price, best: Price) -> None:
    """Check that a search found a plan as fast as the best of the space; faster only with another embed or head."""
    speed, plans = found.images_per_second / best.images_per_second, (str(best.plan), str(found.plan))
    assert speed >= 1 - 1e-9, plans
    assert speed <= 1 + 1e-9 or {"embed", "head"} & {selector for selector, _ in found.plan.layers}, plans


def assert_bounds_hold(search: Search, batch_size: int) -> None:
    """Check that no bound of a uniform plan exceeds its price: that could hide the best plan."""
    compared = 0
    for outline in search._outlines():
        choices, machine = search._uniform_options(outline), search.machine(outline, float("inf"))
        seconds, needs = uniform_bounds(outline, choices, search._sections, machine)
        for at_least, bytes_at_least, option in zip(seconds, needs, choices.options, strict=True):
            plan = replace(outline.pipeline, layers=(("*", option.strategy),), microbatches=outline.microbatches)
            found = price(plan, search.costs, batch_size)
            compared += 1
            assert at_least <= found.seconds * (1 + 1e-9), str(plan)
            assert bytes_at_least <= found.memory_bytes * (1 + 1e-9), str(plan)
    assert compared > 20


def runs(start: int, stop: int, strategies: list[Strategy]) -> Iterator[tuple]:
    """Yield the groups of one or two strategies for neighbouring blocks."""
    for one, other in product(strategies, repeat=2):
        if one == other:
            yield ((f"{start}-{stop - 1}", one),)
        else:
            for middle in range(start + 1, stop):
                yield ((f"{start}-{middle - 1}", one), (f"{middle}-{stop - 1}", other))


def splits(depth: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield all numbers of blocks that stages can have."""
    if stages == 1:
        yield (depth,)
        return
    for first in range(1, depth - stages + 2):
        yield from ((first, *rest) for rest in splits(depth - first, stages - 1))
