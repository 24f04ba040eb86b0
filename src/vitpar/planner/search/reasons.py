"""Reasons why the obvious plans were not chosen: their price, and where the additional time or memory goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vitpar.errors import PlannerError, StrategyError
from vitpar.planner.cost.memory import PARTS, Memory
from vitpar.planner.cost.price import Price
from vitpar.planner.search.best import Search
from vitpar.strategy import Plan, parse, validate
from vitpar.text import size

OBVIOUS = ("dp{n}", "dp{n}+zero1", "dp{n}+zero2", "fsdp{n}", "fsdp{n}+ckpt", "tp{n}", "tp{n}+sp", "pp{n}")
"""Plans with one axis; n: number of ranks."""
MIXED = ("dp{half}xtp2", "pp2xdp{half}", "pp2xtp2xdp{quarter}")
"""Plans with several axes, for more than 4 ranks."""
MOST = 8
"""Micro-batches to try at most, per pipeline rank."""
SPENT = {
    "tensor": "waiting for the other ranks along tp",
    "gather": "gathering parameters",
    "gradients": "reducing gradients",
    "waiting": "waiting for other stages",
    "redistribution": "redistributing between layers",
    "optimizer": "the optimizer",
    "backward": "backward",
    "forward": "forward",
    "teacher": "the teacher's forward",
    "other": "the step's overhead",
}
"""Description of each part of a step's time (`Price.time`)."""


@dataclass(frozen=True)
class Reason:
    """An obvious plan and why it is not the best."""

    plan: str
    """The plan as written in the grammar."""
    price: Price | None
    """Its price with the best number of micro-batches; None if it cannot run."""
    why: str
    """The reason, a phrase for output."""


def reasons(search: Search, best: Price, budget: float) -> tuple[Reason, ...]:
    """Return why each of the obvious plans, with the ranks and the batch size of `best`, is not the best.

    budget: bytes of memory per rank
    """
    ranks, listed = best.plan.world_size, []
    for words in (*OBVIOUS, *MIXED):
        halves = ("half" in words and ranks % 2) or ("quarter" in words and ranks % 4)
        if halves or (("half" in words or "quarter" in words) and ranks <= 4):
            continue
        plan = parse(words.format(n=ranks, half=ranks // 2, quarter=ranks // 4) if ranks > 1 else "dp1")
        if plan.strategy == best.plan.distinct[0] and best.plan.is_uniform and plan.pp == best.plan.pp:
            continue
        listed.append(_reason(search, plan, best, budget))
        if ranks == 1:
            break
    return tuple(listed)


def _reason(search: Search, plan: Plan, best: Price, budget: float) -> Reason:
    """Return the reason for `plan`, with the number of micro-batches that is best for it."""
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
        return Reason(str(plan), quickest, f"{-slower:.1%} more samples/s, but outside the searched space")
    if slower < 0.001:
        return Reason(str(plan), quickest, "is as fast")
    what, most = _more(quickest, best)
    return Reason(str(plan), quickest, f"{slower:.1%} fewer samples/s: {most:.0%} of the step is {SPENT[what]}")


def _needs(price: Price) -> str:
    """Return the memory of the fullest rank, largest parts first, as `31.2 GB on rank 0: optimizer 18.4 GB, …`."""
    place = max(range(len(price.memory)), key=lambda pp: price.memory[pp].total)
    memory: Memory = price.memory[place]
    parts = sorted(((getattr(memory, name), name) for name in PARTS), reverse=True)
    listed = ", ".join(f"{name} {size(part)}" for part, name in parts if part > 0.02 * memory.total)
    where = f"rank {place * price.plan.stage_size}" if price.plan.pp_index == 0 else f"pp index {place}"
    return f"{size(memory.total)} on {where}: {listed}"


def _more(price: Price, best: Price) -> tuple[str, float]:
    """Return the part of the step that exceeds that of the best plan most, and its share of the plan's step, 0 to 1."""
    more = {what: price.time.get(what, 0.0) - best.time.get(what, 0.0) for what in SPENT}
    what = max(more, key=lambda name: more[name])
    return what, price.time.get(what, 0.0) / price.seconds
