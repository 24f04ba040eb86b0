"""Number of ranks that a plan can have here: those a launcher started, or the devices of this machine."""

from __future__ import annotations

from pathlib import Path

from vitpar.errors import StrategyError
from vitpar.launch.resources import cpu_cores
from vitpar.launch.world import Device, find_world
from vitpar.models.config import ModelConfig
from vitpar.recipe.recipe import Chosen, Recipe
from vitpar.strategy import Plan
from vitpar.text import shown


def ranks_available(device: Device) -> int | None:
    """Return the number of ranks that a launcher started, or else the number of GPUs of this machine.

    None means any number, on a CPU without a launcher.
    """
    world = find_world()
    if world is not None:
        return world.size
    if device == "cpu":
        return None
    import torch

    return torch.cuda.device_count()


def resolve(plan: Plan, device: Device) -> Plan:
    """Return the plan with its open degree resolved for the number of available ranks.

    A plan without an open degree may use fewer ranks than the machine has GPUs.

    Raises StrategyError for a plan that does not fit the available ranks.
    """
    ranks = ranks_available(device)
    if find_world() is not None or (plan.is_open and ranks is not None):
        assert ranks is not None
        return plan.resolve(ranks)
    if plan.is_open:
        return plan.resolve(cpu_cores())
    if ranks is not None and plan.world_size > ranks:
        raise StrategyError(
            f"'{shown(plan)}' needs {plan.world_size} devices but this machine has {ranks}: "
            f"use a smaller product of degrees, or --device cpu"
        )
    return plan


def default_ranks(device: Device) -> int:
    """Return the number of ranks to measure or plan with: those available, or one per CPU core."""
    return ranks_available(device) or cpu_cores()


def choose_plan(recipe: Recipe, config: ModelConfig, device: Device, saved: Path | None = None) -> Chosen:
    """Return the recipe's plan for the available ranks.

    Raises StrategyError and RecipeError for a plan that does not fit ranks, model, batch or settings.
    """
    return recipe.chosen(config, lambda plan: resolve(plan, device))
