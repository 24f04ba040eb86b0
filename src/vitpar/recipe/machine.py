"""Settings that depend on the machine: the precision that "auto" stands for, and the largest batch."""

from __future__ import annotations

import sys

from vitpar.errors import RecipeError
from vitpar.launch import find_world
from vitpar.launch.resources import host_memory
from vitpar.models.config import ModelConfig
from vitpar.recipe.recipe import Recipe
from vitpar.strategy.kernels import refuse_attention
from vitpar.text import size

BF16_CAPABILITY = (8, 0)
"""Smallest compute capability of a CUDA device that computes in bf16 (Ampere). Older ones only emulate it."""


def on_device(recipe: Recipe, device: str) -> Recipe:
    """Return `recipe` with its precision on a kind of device.

    Raises RecipeError for what the device does not have.
    """
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
    batch = recipe.train.batch_size
    pixels = batch * config.channels * config.image_size**2 // _most_machines()
    there = host_memory()
    if pixels > there:
        raise RecipeError(
            f"a batch of {batch:,} images of {config.image_size} pixels needs {size(pixels)} of memory on each machine "
            f"for its pixels alone, but this one has {size(there)}: use a smaller --batch-size"
        )


def _most_machines() -> int:
    """Return the number of machines of the world; of a process group that exists, at most: one for each rank."""
    distributed = sys.modules.get("torch.distributed")  # no group exists if it is not imported
    if distributed is not None and distributed.is_initialized():
        ranks: int = distributed.get_world_size()
        return ranks
    world = find_world()
    return world.size // world.local_size if world else 1
