"""Plans whose first or last layer has another strategy than the block next to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vitpar.models.config import ModelConfig
from vitpar.planner.cost.stage import Load
from vitpar.planner.search.bounds import PlanOutline
from vitpar.planner.search.options import Choices
from vitpar.strategy import Plan
from vitpar.strategy.selectors import canonical

MOST = 4
"""Strategies that are tried for a layer at most."""


def with_other_ends(
    plan: Plan, layer: str, choices: Choices, outline: PlanOutline, config: ModelConfig
) -> Iterator[Plan]:
    """Yield `plan` with other strategies of `layer`, embed or head: those with the least seconds of that layer.

    Memory is not compared: a strategy that is fast and does not fit is the caller's to refuse.
    """
    present, of = plan.strategies(config.layer_names)[layer], config.layers[layer].kind
    every = [option for option in choices.options if of in option.loads and option.strategy != present]
    groups = tuple((selector, strategy) for selector, strategy in plan.layers if selector != layer)
    for option in sorted(every, key=lambda option: _seconds(option.loads[of], outline.microbatches))[:MOST]:
        yield replace(plan, layers=canonical(((layer, option.strategy), *groups)))


def _seconds(load: Load, microbatches: int) -> float:
    """Return the seconds of a layer in a step if nothing overlaps."""
    each = load.computes + load.waits + load.sent_each
    return microbatches * each + load.once + load.waits_once + load.edge + load.sent_once
