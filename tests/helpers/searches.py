"""Searches without limits, compared with the best plan of the space."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from vitpar.errors import StrategyError
from vitpar.planner.cost.price import Price, price
from vitpar.planner.search.best import Search
from vitpar.planner.search.bounds import uniform_bounds
from vitpar.planner.search.ranking import SearchEffort
from vitpar.planner.search.space import Space
from vitpar.strategy import Plan, Strategy, validate

EVERYTHING = SearchEffort(tolerance=0.0, simpler=0.0, outlines=10**9, mixes=20, changes=10**9, seconds=10**9)
"""Effort of a search that prices each uniform plan that may be the best."""
CLOSE = 0.03
"""Relative speed by which a search may miss the best of all plans."""


def assert_as_fast(found: Price, best: Price) -> None:
    """Check that a search found a plan as fast as the best of all listed ones, within `CLOSE`."""
    assert found.images_per_second >= (1 - CLOSE) * best.images_per_second, (str(best.plan), str(found.plan))


def assert_bounds_hold(search: Search, batch_size: int) -> None:
    """Check that no bound of a uniform plan exceeds its price: that could hide the best plan."""
    compared = 0
    for outline in search._outlines():
        choices, machine = search.uniform_options(outline), search.machine(outline, float("inf"))
        seconds, needs = uniform_bounds(outline, choices, search.sections, machine)
        for at_least, bytes_at_least, (strategy, *_) in zip(seconds, needs, choices.strategies, strict=True):
            plan = replace(outline.pipeline, layers=(("*", strategy),), microbatches=outline.microbatches)
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


def every_plan(space: Space, batch_size: int, host: bool = True) -> Iterator[Plan]:
    """Yield every plan of a space by plain loops: validation decides which strategies fit.

    host: whether there is host memory to offload to
    """
    for pipeline in space.pipelines():
        strategies = [s for s in space.strategies(space.ranks // pipeline.pipeline_degree) if space.allows(pipeline, s)]
        strategies = [s for s in strategies if host or not s.offload]
        for layers, split in _assignments(pipeline, strategies, space):
            for microbatches in range(1, batch_size + 1):
                plan = replace(pipeline, layers=layers, split=split, microbatches=microbatches)
                try:
                    yield validate(plan, space.config, batch_size)
                except StrategyError:
                    continue


def _assignments(pipeline: Plan, strategies: list[Strategy], space: Space) -> Iterator[tuple]:
    """Yield (strategies of layers, split): up to two strategies for the blocks of a kind on a stage."""
    if pipeline.virtual_stages > 1:
        yield from (((("*", strategy),), "even") for strategy in strategies)
        return
    depth = space.config.num_blocks
    for split in splits(depth, pipeline.num_stages):
        ends = [sum(split[:n]) for n in range(len(split) + 1)]
        kinds = list(space.config.groups.values()) or [range(depth)]
        places = [(max(start, kind.start), min(end, kind.stop)) for start, end in pairwise(ends) for kind in kinds]
        for choice in product(*(list(runs(first, last, strategies)) for first, last in places if first < last)):
            layers = tuple(group for run in choice for group in run)
            if len({strategy for _, strategy in layers}) == 1:
                layers = (("*", layers[0][1]),)
            yield layers, split if len(split) > 1 else "even"
