"""Fixtures that several files share."""

import os
from collections.abc import Callable, Iterator

import pytest

from ranks import RankPool
from vitpar.launch import ALONE, join, leave


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(8)``: the pool of that many ranks, started at the first call, after a failure, and when it is tired."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        for other in [size for size, started in pools.items() if started.alive and started.tired]:
            pools.pop(other).close()
        if size not in pools or not pools[size].alive:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process only."""
    before = dict(os.environ)
    join(ALONE, "cpu")  # writes the world's variables
    yield
    leave()
    os.environ.clear()
    os.environ.update(before)
