"""Settings that depend on the machine: the precision that "auto" stands for, the largest batch, ranks of a plan."""

import sys
from pathlib import Path

from vitpar.errors import RecipeError, StrategyError
from vitpar.launch import find_world
from vitpar.launch.resources import cpu_cores, host_memory
from vitpar.launch.world import Device
from vitpar.models.config import ModelConfig
from vitpar.recipe.recipe import Chosen, Recipe
from vitpar.strategy import Plan
from vitpar.strategy.kernels import refuse_attention
from vitpar.text import shown, size

BF16_CAPABILITY = (8, 0)
"""Smallest compute capability of a CUDA device that computes in bf16 (Ampere). Older ones only emulate it."""


def on_device(recipe: Recipe, device: str) -> Recipe:
    """Return `recipe` with its precision on a kind of device. Raises RecipeError for what the device does not have."""
    recipe = replace_auto_precision(recipe, device)
    refuse_attention(recipe.train.attention, device)
    return recipe


def replace_auto_precision(recipe: Recipe, device: str) -> Recipe:
    """Return `recipe` with precision auto replaced by that of a kind of device.

    A recipe that names its precision is returned unchanged. On CUDA all devices of this machine count, so that its
    ranks agree.

    Raises RecipeError for settings that have no effect in the precision.
    """
    if recipe.train.precision != "auto":
        return recipe
    name = "fp32"
    if device == "cuda":
        import torch

        devices = range(torch.cuda.device_count())
        if all(torch.cuda.get_device_capability(index) >= BF16_CAPABILITY for index in devices):
            name = "bf16"
    return recipe.with_precision(name)


def automatic_precision(known: str | None, device: str) -> str:
    """Return the precision that "auto" stands for in planning, as a training on `device` would resolve it.

    known: precision that the model was profiled in, or the best that a cluster's data sheet has rates for; None if
    unknown.
    """
    return known if known == "bf16" and device == "cuda" else "fp32"


def large_batch_warning(recipe: Recipe, samples: int) -> str | None:
    """Return a warning if the batch is larger than the training set, so that it repeats images; else None."""
    batch = recipe.train.batch_size
    if batch <= samples:
        return None
    return (
        f"the batch of {batch:,} samples is larger than the training set of {samples:,}, so every step "
        f"repeats images: use --batch-size {samples} or less"
    )


def refuse_huge_batch(recipe: Recipe, config: ModelConfig) -> None:
    """Raise RecipeError for a batch whose pixels alone do not fit into the memory of the machines."""
    batch, world, machines = recipe.train.batch_size, find_world(), 1
    distributed = sys.modules.get("torch.distributed")  # no group exists if it is not imported
    if distributed is not None and distributed.is_initialized():
        machines = distributed.get_world_size()  # at most: one for each rank
    elif world is not None:
        machines = world.size // world.local_size
    pixels = batch * config.channels * config.image_size**2 // machines
    there = host_memory()
    if pixels > there:
        raise RecipeError(
            f"a batch of {batch:,} images of {config.image_size} pixels needs {size(pixels)} of memory on each machine "
            f"for its pixels alone, but this one has {size(there)}: use a smaller --batch-size"
        )


def ranks_available(device: Device) -> int | None:
    """Return the number of ranks of the launcher, or of GPUs here; None on a CPU without one: any number."""
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
    """Return the recipe's plan for the available ranks. Raises UserError for one that does not fit."""
    return recipe.chosen(config, lambda plan: resolve(plan, device))
