"""Batches that are too large for the training set or for the machine."""

from __future__ import annotations

import os

from vitpar.errors import RecipeError
from vitpar.launch import find_world
from vitpar.models.config import ViTConfig
from vitpar.strategy.words import size
from vitpar.training.recipe.recipe import Recipe


def large_batch_warning(recipe: Recipe, samples: int) -> str | None:
    """Return a warning of a batch that holds images of the training set several times; None where it does not."""
    batch = recipe.train.batch_size
    if batch <= samples:
        return None
    return (
        f"the batch of {batch:,} images is larger than the training set of {samples:,}, so every step has images "
        f"several times: use --batch-size {samples} or less"
    )


def refuse_huge_batch(recipe: Recipe, config: ViTConfig) -> None:
    """Raise RecipeError for a batch whose pixels alone do not fit into the memory of the machines."""
    world, batch = find_world(), recipe.train.batch_size
    machines = world.size // world.local_size if world else 1
    pixels = batch * config.channels * config.image_size**2 // machines
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if pixels > there:
        raise RecipeError(
            f"a batch of {batch:,} images of {config.image_size} pixels takes {size(pixels)} of memory on each machine "
            f"before anything is computed, but this one has {size(there)}: use a smaller --batch-size"
        )
