"""Why the obvious plans were not chosen: what they would take, and what that is spent on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vitpar.errors import PlannerError, StrategyError
from vitpar.planner.cost.memory import PARTS, Memory
from vitpar.planner.cost.price import Price
from vitpar.planner.search.best import Search
from vitpar.strategy import Plan, parse, validate
from vitpar.text import size

OBVIOUS = ("dp{n}", "dp{n}+zero1", "dp{n}+zero2", "fsdp{n}", "fsdp{n}+ckpt", "tp{n}", "tp{n}+sp", "pp{n}")
MIXED = ("dp{half}xtp2", "pp2xdp{half}", "pp2xtp2xdp{quarter}")
MOST = 8
"""Micro-batches that are tried, for each place on the pp axis."""
SPENT = {
    "tensor": "waiting for the other ranks along tp",
    "gather": "gathering parameters",
    "gradients": "reducing gradients",
    "waiting": "waiting for other stages",
    "redistribution": "redistributing between layers",
    "optimizer": "the optimizer",
    "backward": "backward",
    "forward": "forward",
    "other": "the step's overhead",
    "uneven": "waiting for randomly slower ranks",
}
"""Parts of a step's time, in words."""


@dataclass(frozen=True)
class Reason:
    """An obvious plan, and in a sentence why it is not the best. price: None where it cannot run at all."""

    plan: str
    price: Price | None
    why: str


def reasons(search: Search, best: Price, budget: float) -> tuple[Reason, ...]:
    """Those of the obvious plans for as many ranks and images as the best one has."""
    ranks, found = best.plan.world_size, []
    for words in (*OBVIOUS, *MIXED):
        halves = ("half" in words and ranks % 2) or ("quarter" in words and ranks % 4)
        if halves or (("half" in words or "quarter" in words) and ranks <= 4):
            continue
        plan = parse(words.format(n=ranks, half=ranks // 2, quarter=ranks // 4) if ranks > 1 else "dp1")
        if plan.strategy == best.plan.kinds[0] and best.plan.is_uniform and plan.pp == best.plan.pp:
            continue
        found.append(_reason(search, plan, best, budget))
        if ranks == 1:
            break
    return tuple(found)


def _reason(search: Search, plan: Plan, best: Price, budget: float) -> Reason:
    """The plan with as many micro-batches as are best for it."""
    tries: list[Price] = []
    problem = ""
    for microbatches in search.space.microbatches(plan, best.batch_size):
        if tries and microbatches > MOST * plan.pipeline_degree:
            break
        try:
            made = validate(replace(plan, microbatches=microbatches), search.space.config, best.batch_size)
            tries.append(search.price(made, best.batch_size))
        except (StrategyError, PlannerError) as error:
            problem = problem or str(error)
    if not tries:
        return Reason(str(plan), None, problem or "no number of micro-batches fits the batch")
    fitting = [price for price in tries if price.memory_bytes <= budget]
    if not fitting:
        least = min(tries, key=lambda price: price.memory_bytes)
        return Reason(str(plan), least, f"needs {_needs(least)}")
    quickest = min(fitting, key=lambda price: price.seconds)
    slower = 1 - quickest.images_per_second / best.images_per_second
    if slower < -0.001:
        return Reason(str(plan), quickest, f"{-slower:.1%} more images/s, but outside the searched space")
    if slower < 0.001:
        return Reason(str(plan), quickest, "is as fast")
    what, most = _more(quickest, best)
    return Reason(str(plan), quickest, f"{slower:.1%} fewer images/s: {most:.0%} of the step is {SPENT[what]}")


def _needs(price: Price) -> str:
    """`31.2 GB on rank 0: optimizer 18.4, …`, the largest parts first."""
    place = max(range(len(price.memory)), key=lambda pp: price.memory[pp].total)
    memory: Memory = price.memory[place]
    parts = sorted(((getattr(memory, name), name) for name in PARTS), reverse=True)
    listed = ", ".join(f"{name} {size(part)}" for part, name in parts if part > 0.02 * memory.total)
    where = f"rank {place * price.plan.stage_size}" if price.plan.pp_index == 0 else f"pp index {place}"
    return f"{size(memory.total)} on {where}: {listed}"


def _more(price: Price, best: Price) -> tuple[str, float]:
    """Return the part of the step that a plan spends most on compared with the best, and its share of the step."""
    more = {what: price.time.get(what, 0.0) - best.time.get(what, 0.0) for what in SPENT}
    what = max(more, key=lambda name: more[name])
    return what, price.time.get(what, 0.0) / price.seconds
