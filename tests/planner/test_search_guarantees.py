"""Guarantees of the plan search on random clusters, with its default effort.

Each cluster has 2 to 24 devices on 1 to 3 nodes, often slow links, a small model, and one or several batch sizes. All
uniform plans (one strategy for all layers, stages of equal size) are priced one by one, with every schedule and number
of micro-batches. The search runs with three memory budgets: one that few uniform plans fit, one that a quarter of them
fit, and one that all fit.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import memory_bytes, price
from vitpar.planner.profile.cluster import Cluster, HostMemory, Network, Wire
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Overlap
from vitpar.planner.search.best import Search
from vitpar.planner.search.reasons import reasons
from vitpar.planner.search.space import FLAGS, Space
from vitpar.strategy import Plan, validate

SHARES = (0.03, 0.25, 1.0)
"""Share of the uniform plans that fit each budget."""
TOLERANCE = 1e-3
"""Tolerance of the search."""
MOST_PLANS = 1500
"""Most uniform plans of a cluster; a cluster with more is drawn again, because each plan is priced."""


@dataclass
class Drawn:
    """A random cluster and model, and all its uniform plans."""

    number: int
    """Seed."""
    costs: LayerCosts
    space: Space
    plans: list[tuple[Plan, int]]
    """Uniform plans with their batch sizes."""


def draw(number: int) -> Drawn:
    """Return the random cluster of the seed `number`."""
    chance = random.Random(number)
    while True:
        costs, space = _draw(number, chance)
        plans = list(uniform_plans(space))
        if 0 < len(plans) <= MOST_PLANS:
            return Drawn(number, costs, space, plans)


def _draw(number: int, chance: random.Random) -> tuple[LayerCosts, Space]:
    nodes = chance.choice((1, 2, 3))
    bandwidth, between = 10 ** chance.uniform(9, 11.5), 10 ** chance.uniform(8, 10.5)
    width, heads = chance.choice(((192, 3), (384, 6), (768, 12), (1024, 16)))
    cluster = Cluster(
        name=f"drawn {number}",
        nodes=nodes,
        devices_per_node=chance.choice((2, 4, 8)),
        device_name="drawn",
        memory_bytes=10**11,
        matmul={"float32": 10 ** chance.uniform(12.5, 14)},
        memory_bandwidth=10 ** chance.uniform(11, 12.3),
        sustained=1.0,
        intra=Wire(bandwidth=bandwidth, latency=chance.choice((0, 5e-6, 5e-5))),
        inter=Network(bandwidth=min(bandwidth, between), latency=chance.choice((1e-5, 1e-4))),
        overlap=chance.choice((None, Overlap(compute=1.1, communication=1.2))),
        host=chance.choice((None, HostMemory(bandwidth=1e10, memory_bandwidth=5e10))),
    )
    config = model_config(
        "vit_custom",
        embed_dim=width,
        num_heads=heads,
        depth=chance.choice((4, 6, 8)),
        patch_size=16,
        image_size=chance.choice((64, 128, 224)),
        num_classes=chance.choice((10, 1000)),
    )
    hardware = cluster.hardware()
    model = estimate_model(config, "fp32", hardware, tensors(config, hardware.ranks))
    flags = tuple(flag for flag in FLAGS if flag != "offload" or hardware.host)
    batches = chance.choice(((16,), (24,), (32,), (64,), (8, 16, 32)))
    return LayerCosts(config, hardware, model), Space(
        config, hardware.ranks, batches, flags=flags, tensors=model.tensors
    )


def uniform_plans(space: Space) -> Iterator[tuple[Plan, int]]:
    """Yield every uniform plan of `space` and its batch size, by plain loops."""
    for batch_size in space.batch_sizes:
        for pipeline in space.pipelines():
            strategies = space.strategies(space.ranks // pipeline.pipeline_degree)
            allowed = [strategy for strategy in strategies if space.allows(pipeline, strategy)]
            for microbatches in space.microbatches(pipeline, batch_size):
                for strategy in allowed:
                    plan = replace(pipeline, layers=(("*", strategy),), microbatches=microbatches)
                    try:
                        yield validate(plan, space.config, batch_size), batch_size
                    except StrategyError:
                        continue


def check(number: int) -> None:
    """Search on the cluster of the seed `number` with three budgets, and compare with every uniform plan."""
    drawn = draw(number)
    needs = [memory_bytes(plan, drawn.costs, batch_size) for plan, batch_size in drawn.plans]
    speeds = [price(plan, drawn.costs, batch_size).images_per_second for plan, batch_size in drawn.plans]
    for share in SHARES:
        budget = sorted(needs)[round(share * (len(needs) - 1))]
        search = Search(drawn.space, drawn.costs)
        result = search.best(budget)
        assert result.plans, f"cluster {number}: a uniform plan fits {share:.0%}, but none is found"
        best = result.plans[0]
        obvious = [reason.price for reason in reasons(search, best, budget) if reason.price]
        others = {
            "the fastest uniform plan": [s for s, need in zip(speeds, needs, strict=True) if need <= budget],
            "the next best": [one.images_per_second for one in result.plans],
            "the frontier": [one.images_per_second for one in search.frontier(best)],
            "why not": [one.images_per_second for one in obvious if one.memory_bytes <= budget],
        }
        for name, found in others.items():
            assert max(found, default=0) <= (1 + TOLERANCE) * best.images_per_second, f"cluster {number}: {name}"


@pytest.mark.parametrize(
    "numbers",
    [
        range(1),
        pytest.param(range(1, 6), marks=pytest.mark.slow),
        *(pytest.param(range(n, n + 10), marks=pytest.mark.soak) for n in range(0, 200, 10)),
    ],
    ids=lambda numbers: f"{numbers.start} to {numbers.stop - 1}",
)
def test_search_is_never_slower_than_a_uniform_plan_or_another_it_lists(numbers: range) -> None:
    for number in numbers:
        check(number)
