"""Search plans on random clusters, and compare each choice with every uniform plan.

    python experiments/search_guarantees.py --json rows.json              # 200 clusters, about 20 minutes on two cores
    python experiments/search_guarantees.py --clusters 100 --before ROWS   # and compare with earlier rows

A cluster has 2 to 24 devices, odd numbers among them, on 1 to 3 nodes. Links are random or of 10 or 25 Gb/s a node; the
model is a small ViT or Swin; batch sizes are one or several. All uniform plans (one strategy for all layers, stages of
equal size) are priced one by one, with every schedule and number of micro-batches. The search runs with its default
effort and three memory budgets: one that few uniform plans fit, one that a quarter of them fit, and one that all fit.
Searches on slow networks follow (`CASES`), among them pairs of which one has fewer options.
Exit code 1: a choice was slower than a uniform plan or one with fewer options, or more than 1 % slower than before.
Earlier rows: experiments/results/raw/search_2core_2026-11-30.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.harness import Report, table
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.models.config import ModelConfig
from vitpar.planner.automatic import make_search, run_search
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import memory_bytes, price
from vitpar.planner.profile.cluster import Cluster, HostRates, Network, Wire, find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.profile.profiles import Overlap
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import FLAGS, Space
from vitpar.planner.sources import usual_budget
from vitpar.strategy import SCHEDULES, Plan, validate

SHARES = (0.03, 0.25, 1.0)
"""Share of the uniform plans that fit each budget."""
TOLERANCE = 1e-3
"""Tolerance of the search."""
SLOWER = 0.01
"""Relative loss of speed since earlier rows that fails."""
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
    nodes, devices = chance.choice((1, 2, 3)), chance.choice((2, 3, 4, 5, 6, 7, 8))
    bandwidth, between = 10 ** chance.uniform(9, 11.5), 10 ** chance.uniform(8, 10.5)
    # 10 and 25 Gb/s on a card that all devices of a node share.
    slow = chance.choice((None, 1.25e9, 3.125e9))
    between = slow or between
    cluster = Cluster(
        name=f"drawn {number}",
        nodes=nodes,
        devices_per_node=devices,
        device_name="drawn",
        memory_bytes=10**11,
        matmul={"float32": 10 ** chance.uniform(12.5, 14)},
        memory_bandwidth=10 ** chance.uniform(11, 12.3),
        sustained=1.0,
        intra=Wire(bandwidth=bandwidth, latency=chance.choice((0, 5e-6, 5e-5))),
        inter=Network(
            bandwidth=min(bandwidth, between), latency=chance.choice((1e-5, 1e-4)), nics_per_node=1 if slow else None
        ),
        overlap=chance.choice((None, Overlap(compute=1.1, communication=1.2))),
        host=chance.choice((None, HostRates(bandwidth=1e10, memory_bandwidth=5e10))),
    )
    config = _model(chance)
    hardware = cluster.hardware()
    model = estimate_model(config, "fp32", hardware, tensors(config, hardware.ranks))
    flags = tuple(flag for flag in FLAGS if flag != "offload" or hardware.host)
    batches = chance.choice(((16,), (24,), (32,), (64,), (8, 16, 32), (hardware.ranks, 4 * hardware.ranks)))
    space = Space(config, hardware.ranks, batches, flags=flags, tensors=model.tensors)
    return LayerCosts(config, hardware, model), space


def _model(chance: random.Random) -> ModelConfig:
    """Return a small ViT, or one time in five a Swin, whose blocks are of several kinds."""
    classes = chance.choice((10, 1000))
    if chance.random() < 0.2:
        return model_config(chance.choice(("swin_nano_patch2_window4_32", "swin_tiny_patch4_window7_224")))
    width, heads = chance.choice(((192, 3), (384, 6), (768, 12), (1024, 16)))
    return model_config(
        "vit_custom",
        embed_dim=width,
        num_heads=heads,
        depth=chance.choice((4, 6, 8)),
        patch_size=16,
        image_size=chance.choice((64, 128, 224)),
        num_classes=classes,
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


def priced(drawn: Drawn) -> tuple[list[float], list[float]]:
    """Return (bytes of a rank, images/s) of the uniform plans."""
    needs = [memory_bytes(plan, drawn.costs, batch_size) for plan, batch_size in drawn.plans]
    return needs, [price(plan, drawn.costs, batch_size).images_per_second for plan, batch_size in drawn.plans]


def budgets(needs: Sequence[float]) -> list[float]:
    """Return the memory budgets of a cluster, by the bytes that its uniform plans need."""
    return [sorted(needs)[round(share * (len(needs) - 1))] for share in SHARES]


def rows_of(number: int) -> list[dict[str, Any]]:
    """Return a row for each budget of the cluster of the seed `number`."""
    drawn = draw(number)
    needs, speeds = priced(drawn)
    found = list[dict[str, Any]]()
    for share, budget in zip(SHARES, budgets(needs), strict=True):
        result = Search(drawn.space, drawn.costs).best(budget)
        uniform = max(speed for speed, need in zip(speeds, needs, strict=True) if need <= budget)
        found.append(
            {
                "cluster": number,
                "ranks": drawn.space.ranks,
                "model": drawn.space.config.name,
                "share": share,
                "plan": str(result.plans[0].plan) if result.plans else None,
                "speed": result.plans[0].images_per_second if result.plans else 0.0,
                "uniform": uniform,
                "exact": result.exact,
                "gap": float(result.gap),
                "seconds": result.seconds,
            }
        )
    return found


THIRTEEN = {"embed_dim": 384, "num_heads": 6, "depth": 13, "patch_size": 16, "image_size": 224, "num_classes": 1000}
LESS = ("ckpt", "ckpt.selective", "sp", "zero1", "zero2", "offload", "2d", "2.5d", "3d")
CASES: dict[str, tuple[str, int, int, float, int, tuple[str, ...], dict[str, Any]]] = {
    "2x8, 10 Gb/s, ViT-L": ("vit_large_patch16_224", 2, 8, 10, 1024, (), {}),
    "4x8, 10 Gb/s, ViT-L": ("vit_large_patch16_224", 4, 8, 10, 1024, (), {}),
    "9x4, 100 Gb/s, BERT-L": ("bert_large", 9, 4, 100, 144, (), {}),
    "9x4, 100 Gb/s, BERT-L, 1f1b": ("bert_large", 9, 4, 100, 144, tuple(SCHEDULES)[1:], {}),
    "5x2, 100 Gb/s, 13 blocks": ("vit_custom", 5, 2, 100, 96, (), THIRTEEN),
    "5x2, 100 Gb/s, 13 blocks, fewer options": ("vit_custom", 5, 2, 100, 96, LESS, THIRTEEN),
    "4x9, 100 Gb/s, T5-L": ("t5_large", 4, 9, 100, 144, (), {}),
    "4x9, 100 Gb/s, T5-L, 1f1b": ("t5_large", 4, 9, 100, 144, tuple(SCHEDULES)[1:], {}),
}
"""Searches by name: model, nodes, A100s a node, Gb/s a node, batch size, flags and schedules left out, shape."""
FEWER = tuple((f"{name.rpartition(', ')[0]}", name) for name in CASES if name.endswith(("1f1b", "fewer options")))
"""Pairs of cases of which the second has fewer options."""


def case_row(name: str) -> dict[str, Any]:
    """Return the row of one of `CASES`."""
    model, nodes, devices, gigabits, batch_size, without, shape = CASES[name]
    cluster = find_cluster(f"{nodes}x{devices}xA100-80GB")
    assert cluster.inter is not None
    network = cluster.inter.model_copy(update={"bandwidth": gigabits * 1e9 / 8, "nics_per_node": 1})
    hardware, config = cluster.model_copy(update={"inter": network}).hardware(), model_config(model, **shape)
    profile = estimate_model(config, "bf16", hardware, tensors(config, hardware.ranks), compiled=True)
    costs = LayerCosts(config, hardware, profile)
    begun = time.process_time()
    result = run_search(make_search(costs, (batch_size,), 2, without=without), usual_budget(costs))
    best = result.plans[0]
    return {
        "case": name,
        "plan": str(best.plan),
        "speed": best.images_per_second,
        "gap": float(result.gap),
        "seconds": time.process_time() - begun,
    }


def main() -> int:
    """Search on all clusters and print the table."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--clusters", type=int, default=200, metavar="N", help="number of clusters (200)")
    made.add_argument("--processes", type=int, default=2, metavar="N", help="searches at once (2)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    made.add_argument(
        "--before", type=Path, metavar="FILE", help="rows to compare with, such as those of another commit"
    )
    options = made.parse_args()
    report, rows = Report(options.json), list[dict[str, Any]]()
    with ProcessPoolExecutor(options.processes) as pool:
        cases = list(pool.map(case_row, CASES))
        print("\n".join(f"{r['case']}: {r['speed']:.1f}, gap {r['gap']:.1%}, {r['seconds']:.1f} s" for r in cases))
        for done, found in enumerate(pool.map(rows_of, range(options.clusters)), start=1):
            rows += found
            report.keep("rows", [*cases, *rows])
            print(f"\r{done} of {options.clusters} clusters", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print("\n".join(table(COLUMNS, [summary([row for row in rows if row["share"] == share]) for share in SHARES])))
    faults = [
        f"{name(row)}: slower than a uniform plan" for row in rows if slower(row["speed"], row["uniform"], TOLERANCE)
    ]
    speeds = {row["case"]: row["speed"] for row in cases}
    faults += [f"{every}: slower than {few}" for every, few in FEWER if slower(speeds[every], speeds[few], TOLERANCE)]
    if options.before:
        faults += changes([*cases, *rows], json.loads(options.before.read_text())["rows"])
    print("\n".join(faults) or "No choice was slower than a uniform plan.")
    return 1 if faults else 0


COLUMNS = (
    "uniform plans that fit",
    "searches",
    "faster than all",
    "proved optimal",
    "gap, median",
    "gap, 9 in 10",
    "seconds, median",
    "seconds, longest",
)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the cells of one budget."""
    gaps, seconds = [row["gap"] for row in rows], [row["seconds"] for row in rows]
    most = quantiles(gaps, n=10)[-1] if len(gaps) > 1 else gaps[0]
    return [
        f"{rows[0]['share']:.0%}",
        f"{len(rows)}",
        f"{sum(row['speed'] > (1 + TOLERANCE) * row['uniform'] for row in rows)}",
        f"{sum(row['exact'] for row in rows)}",
        f"{median(gaps):.1%}",
        f"{most:.1%}",
        f"{median(seconds):.2f}",
        f"{max(seconds):.1f}",
    ]


def changes(rows: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> list[str]:
    """Print how speeds and durations changed since earlier rows; return a line for each choice that became slower."""
    known = {name(row): row for row in before}
    pairs = [(known[name(row)], row) for row in rows if name(row) in known]
    better = sum(slower(old["speed"], new["speed"], SLOWER) for old, new in pairs)
    times = [sum(row["seconds"] for row in side) for side in zip(*pairs, strict=True)]
    print(f"{better} of {len(pairs)} choices are more than 1 % faster than before.")
    print(f"The searches take {times[1]:.0f} s; before {times[0]:.0f} s.")
    return [
        f"{name(new)}: {1 - new['speed'] / old['speed']:.1%} slower than before ({old['plan']}; now {new['plan']})"
        for old, new in pairs
        if slower(new["speed"], old["speed"], SLOWER)
    ]


def name(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    return f"cluster {row['cluster']}, {row['share']:.0%}" if "share" in row else row["case"]


def slower(speed: float, other: float, tolerance: float) -> bool:
    """Return whether `speed` is lower than `other` by more than `tolerance`."""
    return other > (1 + tolerance) * speed


if __name__ == "__main__":
    sys.exit(main())
