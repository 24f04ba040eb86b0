"""Limits of a plan: the purposes that its step is spent on, and how much a better machine or a larger batch saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from vitpar.errors import StrategyError
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.price import Price, price
from vitpar.planner.search.ranking import BestPlans, SearchEffort
from vitpar.strategy import validate

PURPOSES = {
    "computing": ("forward", "backward", "teacher"),
    "tensor-parallel communication": ("tensor", "redistribution"),
    "gathers and gradients": ("gather", "gradients"),
    "pipeline idle": ("waiting",),
    "optimizer": ("optimizer",),
    "overhead": ("other",),
}
"""Parts of `Price.time`, by what limits them."""
MORE = 1.5
"""Memory of a rank after the change of memory, relative to that before."""


@dataclass(frozen=True)
class Gain:
    """Predicted effect of one change of the machine or of the batch."""

    change: str
    """The change, a phrase for output."""
    price: Price
    """The best plan after the change."""
    time: float
    """Relative change of the time per image: -0.5 for half the time."""


def shares(priced: Price) -> dict[str, float]:
    """Return the shares of a step, 0 to 1, by the names of `PURPOSES`, largest first."""
    by_purpose = {
        name: sum(priced.time.get(part, 0.0) for part in parts) / priced.seconds for name, parts in PURPOSES.items()
    }
    return dict(sorted(by_purpose.items(), key=lambda item: -item[1]))


def with_links(costs: LayerCosts, factor: float, between_nodes: bool | None = None) -> LayerCosts:
    """Return the costs on a machine whose links are `factor` times as fast.

    between_nodes: whether only links between nodes change, or only those within nodes; None for all
    """
    unchanged = None if between_nodes is None else not between_nodes
    links = tuple(link if (link.nodes > 1) == unchanged else link.slower(1 / factor) for link in costs.hardware.links)
    hardware = costs.hardware.model_copy(update={"links": links})
    return LayerCosts(costs.whole, hardware, costs.model, costs.frozen, costs.teacher)


def gains(plans: Sequence[Price], costs: LayerCosts, budget: float, moments: float) -> tuple[Gain, ...]:
    """Return how much each change shortens the time per image of the first plan, the most helpful change first.

    plans: the best plan, and others that may be better after a change, also if they do not fit now
    budget: bytes of memory per rank
    moments: bytes of optimizer state per byte of parameters
    """
    best, improvements = plans[0], []
    for change, here, batch_size, memory in _changes(best, costs, budget, len(plans) > 1):
        fitting = BestPlans(SearchEffort())
        for one in (found for plan in plans for found in _again(plan, here, batch_size, moments)):
            if one.memory_bytes <= memory:
                fitting.offer(one)
        if fitting.ranked:
            chosen = fitting.ranked[0]
            improvements.append(Gain(change, chosen, best.images_per_second / chosen.images_per_second - 1))
    return tuple(sorted(improvements, key=lambda gain: gain.time))


def _changes(
    best: Price, costs: LayerCosts, budget: float, several: bool
) -> Iterator[tuple[str, LayerCosts, int, float]]:
    """Yield (change in words, costs after it, batch size, bytes of memory per rank)."""
    hardware, batch_size = costs.hardware, best.batch_size
    twice = hardware.slower(0.5, 1.0), costs.model.slower(0.5, 1.0)
    faster = LayerCosts(costs.whole, *twice, costs.frozen, costs.teacher)
    yield "devices and hosts that compute twice as fast", faster, batch_size, budget
    crossing = {link.nodes > 1 for link in hardware.links}
    for between in sorted(crossing):
        where = "" if len(crossing) == 1 else " between nodes" if between else " within nodes"
        yield f"links{where} twice as fast", with_links(costs, 2.0, between), batch_size, budget
    yield f"twice the batch, {2 * batch_size:,} samples", costs, 2 * batch_size, budget
    if several:  # memory changes the choice of a plan, not the time of one
        yield "50 % more memory", costs, batch_size, MORE * budget


def _again(before: Price, costs: LayerCosts, batch_size: int, moments: float) -> Iterator[Price]:
    """Yield prices of a plan at `batch_size`: with the number of micro-batches that it had, and with their size."""
    count = before.plan.microbatches or 1
    for microbatches in sorted({count, max(1, count * batch_size // before.batch_size)}):
        with suppress(StrategyError):
            plan = replace(before.plan, microbatches=microbatches, microbatch_size=None)
            yield price(validate(plan, costs.config, batch_size), costs, batch_size, moments)
