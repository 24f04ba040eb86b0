"""Check the guarantees of the plan search on random clusters, with its default effort.

    python experiments/search_guarantees.py --json rows.json          # 200 clusters, half an hour on one core
    python experiments/search_guarantees.py --clusters 20 --first 40

Each cluster has 2 to 24 devices on 1 to 3 nodes, often slow links, a small model, and one or several batch sizes. All
uniform plans (one strategy for all layers, stages of equal size) are priced one by one, with every schedule and number
of micro-batches. The search runs with three memory budgets: one that few uniform plans fit, one that a quarter of them
fit, and one that all fit.

- Its plan must not be slower than the fastest uniform plan that fits, and it must find a plan if a uniform one fits.
- The other plans that it lists (next best, less memory, obvious ones) must not be faster than its choice.

Also shown: the largest possible gain of an unseen plan ("gap"), and the duration of the search. Exit code 1: a
guarantee is broken by more than 0.1 %, the tolerance of the search.
"""

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

from bench.harness import Report, parser
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import memory_bytes, price
from vitpar.planner.profile.cluster import Cluster, HostMemory, Wire
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Overlap
from vitpar.planner.search.best import Search
from vitpar.planner.search.reasons import reasons
from vitpar.planner.search.space import FLAGS, Space
from vitpar.strategy import Plan, validate

SHARES = (0.03, 0.25, 1.0)
"""Share of the uniform plans that fit each budget."""
TOLERANCE = 1e-3
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
        inter=Wire(bandwidth=min(bandwidth, between), latency=chance.choice((1e-5, 1e-4))),
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


def check(drawn: Drawn) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget. `broken` holds by how much a guarantee is broken, by name."""
    needs = [memory_bytes(plan, drawn.costs, batch_size) for plan, batch_size in drawn.plans]
    speeds = [price(plan, drawn.costs, batch_size).images_per_second for plan, batch_size in drawn.plans]
    for share in SHARES:
        budget = sorted(needs)[round(share * (len(needs) - 1))]
        fastest = max(speed for speed, need in zip(speeds, needs, strict=True) if need <= budget)
        search = Search(drawn.space, drawn.costs)
        begun = time.process_time()
        result = search.best(budget)
        seconds = time.process_time() - begun
        others = {"a plan with one strategy": fastest}
        found = result.plans[0].images_per_second if result.plans else 0.0
        if result.plans:
            obvious = [reason.price for reason in reasons(search, result.plans[0], budget) if reason.price]
            lists = {
                "the next best": result.plans,
                "the frontier": search.frontier(result.plans[0]),
                "why not": [one for one in obvious if one.memory_bytes <= budget],
            }
            others |= {name: max((one.images_per_second for one in plans), default=0) for name, plans in lists.items()}
        broken = {name: speed / found - 1 for name, speed in others.items() if speed > (1 + TOLERANCE) * found > 0}
        yield {
            "cluster": drawn.number,
            "devices": drawn.space.ranks,
            "plans": len(needs),
            "share": share,
            "gain": found / fastest - 1,
            "gap": result.gap,
            "exact": result.exact,
            "seconds": seconds,
            "broken": broken if found else {"no plan": 1.0},
        }


def statistics(rows: list[dict[str, Any]]) -> list[str]:
    """Return the cells of the table for the rows of one budget."""
    gaps, seconds = ([row[key] for row in rows] for key in ("gap", "seconds"))
    return [
        f"{len(rows)}",
        f"{sum(row['gain'] > TOLERANCE for row in rows)}",
        f"{sum(row['exact'] for row in rows)}",
        f"{median(gaps):.1%}",
        f"{(quantiles(gaps, n=10)[-1] if len(gaps) > 1 else gaps[0]):.1%}",
        f"{median(seconds):.1f}",
        f"{max(seconds):.1f}",
        f"{sum(bool(row['broken']) for row in rows)}",
    ]


def main() -> int:
    """Read the options, search, print a table; return the exit code."""
    made = parser(__doc__)
    made.add_argument("--clusters", type=int, default=200, metavar="N", help="how many (default: 200)")
    made.add_argument("--first", type=int, default=0, metavar="N", help="number of the first (default: 0)")
    given = made.parse_args()
    report, rows = Report(given.json), list[dict[str, Any]]()
    for number in range(given.first, given.first + given.clusters):
        for row in check(draw(number)):
            rows.append(row)
            broken = ", ".join(f"{name} is {by:.1%} faster" for name, by in row["broken"].items())
            print(
                f"cluster {number:3}: {row['devices']:2} devices, {row['plans']:4} plans, {row['share']:4.0%} fit: "
                f"{row['gain']:+6.1%}, gap {row['gap']:6.1%}, {row['seconds']:5.2f} s  {broken}",
                flush=True,
            )
        report.keep("rows", rows)
    heads = ("uniform plans that fit", "searches", "faster", "exact", "gap", "gap of 9 in 10", "seconds", "longest")
    cells = [[f"{share:.0%}", *statistics([row for row in rows if row["share"] == share])] for share in SHARES]
    report.show("searches", (*heads, "guarantees broken"), cells, len(rows))
    return int(any(row["broken"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
