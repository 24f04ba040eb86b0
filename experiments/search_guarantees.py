"""Check the guarantees of the plan search on random clusters, with its default effort.

    python experiments/search_guarantees.py --json rows.json          # 200 clusters, half an hour on one core
    python experiments/search_guarantees.py --clusters 20 --first 40

Each cluster has 2 to 24 devices on 1 to 3 nodes, often slow links, a small model, and one or several batch sizes. All
uniform plans (one strategy for all layers, stages of equal size) are priced one by one, with every schedule and number
of micro-batches. The search runs with three memory budgets: one that few uniform plans fit, one that a quarter of them
fit, and one that all fit.

- Its plan must not be slower than the fastest uniform plan that fits, and it must find a plan if a uniform one fits.
- The other plans that it lists (next best, less memory, obvious ones) must not be faster than its choice.
- Its plan should not be slower with more memory, or with more roles and flags. Searches that are cut short do not
  guarantee that, so exceptions are only counted.
- Also shown: the largest possible gain of an unseen plan ("gap"), and the duration of the search.

Exit code 1: one of the first two guarantees is broken by more than 0.1 %, the tolerance of the search.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.header import header
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import memory_bytes, price
from vitpar.planner.profile.cluster import Cluster, HostMemory, Wire
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Overlap
from vitpar.planner.search.best import Search
from vitpar.planner.search.reasons import reasons
from vitpar.planner.search.result import Result
from vitpar.planner.search.space import FLAGS, Space
from vitpar.strategy import Plan, validate

SHARES = (0.03, 0.25, 1.0)
"""Share of the uniform plans that fit each budget."""
TOLERANCE = 1e-3
MOST_PLANS = 1500
"""Most uniform plans of a cluster; a cluster with more is drawn again, because each plan is priced."""
PROMISED = ("no plan", "a plan with one strategy", "the next best", "the frontier", "why not")
"""Guarantees that must not be broken, by the names in `check`."""
FEWER: tuple[dict[str, Any], ...] = ({"flags": ()}, {"roles": ("pp", "dp")}, {"schedules": ("1f1b",)})
"""Restrictions of the space. A search without them should find no slower plan."""


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
    budgets = [sorted(needs)[round(share * (len(needs) - 1))] for share in SHARES]
    slower = 0.0
    for budget, share in zip(budgets, SHARES, strict=True):
        fastest = max(speed for speed, need in zip(speeds, needs, strict=True) if need <= budget)
        search = Search(drawn.space, drawn.costs)
        begun = time.process_time()
        result = search.best(budget)
        seconds = time.process_time() - begun
        found = result.plans[0].images_per_second if result.plans else 0.0
        broken = {"a plan with one strategy": fastest, "less memory": slower}
        if result.plans:
            broken |= _besides(search, result, budget)
        for fewer in FEWER if share == SHARES[1] else ():
            others = Search(replace(drawn.space, **fewer), drawn.costs).best(budget).plans
            broken[f"only {fewer}"] = others[0].images_per_second if others else 0.0
        slower = max(slower, found)
        yield {
            "cluster": drawn.number,
            "devices": drawn.space.ranks,
            "per_node": drawn.costs.hardware.ranks_per_node,
            "plans": len(needs),
            "share": share,
            "fastest": fastest,
            "found": found,
            "gap": result.gap,
            "exact": result.exact,
            "seconds": seconds,
            "broken": {name: speed / found - 1 for name, speed in broken.items() if speed > (1 + TOLERANCE) * found}
            if found
            else {"no plan": 1.0},
        }


def _besides(search: Search, result: Result, budget: float) -> dict[str, float]:
    """Return the images/s of the fastest plan in each list that is shown with the chosen plan."""
    best = result.plans[0]
    obvious = [reason.price for reason in reasons(search, best, budget) if reason.price]
    return {
        "the next best": max(other.images_per_second for other in result.plans),
        "the frontier": max(other.images_per_second for other in search.frontier(best)),
        "why not": max((o.images_per_second for o in obvious if o.memory_bytes <= budget), default=0.0),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return statistics of all rows."""
    gains = [row["found"] / row["fastest"] - 1 for row in rows]
    gaps, seconds = sorted(row["gap"] for row in rows), sorted(row["seconds"] for row in rows)
    broken = [name for row in rows for name in row["broken"]]
    return {
        "searches": len(rows),
        "broken": {name: broken.count(name) for name in dict.fromkeys(broken)},
        "faster than every plan with one strategy": sum(gain > TOLERANCE for gain in gains),
        "by at most": max(gains),
        "exact": sum(row["exact"] for row in rows),
        "gap, median": median(gaps),
        "gap of nine of ten at most": quantiles(gaps, n=10)[-1] if len(gaps) > 1 else gaps[0],
        "gap up to 25 %": sum(gap <= 0.25 for gap in gaps) / len(gaps),
        "seconds, median": median(seconds),
        "seconds, longest": seconds[-1],
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the statistics of each budget."""
    columns = ("budget", "searches", "faster", "exact", "gap", "gap of 9 in 10", "gap up to 25 %", "seconds", "longest")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for share in SHARES:
        found = summary([row for row in rows if row["share"] == share])
        cells = (
            f"{share:.0%} of the uniform plans fit",
            found["searches"],
            found["faster than every plan with one strategy"],
            found["exact"],
            f"{found['gap, median']:.1%}",
            f"{found['gap of nine of ten at most']:.1%}",
            f"{found['gap up to 25 %']:.0%}",
            f"{found['seconds, median']:.1f}",
            f"{found['seconds, longest']:.1f}",
        )
        yield f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Read the options, search, print a table and a summary; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=200, metavar="N", help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    options = parser.parse_args()
    facts, rows = header(), []
    for name, value in facts.items():
        print(f"- {name}: {value}")
    for number in range(options.first, options.first + options.clusters):
        for row in check(draw(number)):
            rows.append(row)
            broken = ", ".join(f"{name} is {by:.1%} faster" for name, by in row["broken"].items())
            print(
                f"cluster {row['cluster']:3}: {row['devices']:2} devices, {row['plans']:4} plans, "
                f"{row['share']:4.0%} fit: "
                f"{row['found'] / row['fastest'] - 1:+6.1%}, gap {row['gap']:6.1%}, {row['seconds']:5.2f} s  {broken}",
                flush=True,
            )
        if options.json:
            options.json.write_text(json.dumps({"header": facts, "summary": summary(rows), "rows": rows}, indent=1))
    print(*table(rows), sep="\n")
    for name, value in summary(rows).items():
        print(f"{name}: {f'{value:.3g}' if isinstance(value, float) else value}")
    return int(any(name in PROMISED for row in rows for name in row["broken"]))


if __name__ == "__main__":
    sys.exit(main())
