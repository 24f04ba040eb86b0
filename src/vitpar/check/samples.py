"""The samples of a check: random, and the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitpar.data import Mixed
from vitpar.data.randomness import sample_keys
from vitpar.models.config import ViTConfig
from vitpar.training.input import mixing, order_of
from vitpar.training.recipe import Recipe


@dataclass(frozen=True)
class Samples:
    """What the steps of a check are given, whole.

    plain: for each SGD step images, float32 [batch, channels, size, size], labels and keys, int64 [batch]. Every sample
    is another, so that a micro-batch or a slice taken twice shows. pixels: the same for each step of the recipe, with
    images as uint8; a sample comes as often in a row as the recipe repeats it. mixed: how these images are mixed, None
    where they are not.
    """

    plain: list[tuple[Tensor, Tensor, Tensor]]
    pixels: list[tuple[Tensor, Tensor, Tensor]]
    mixed: list[Mixed | None]


def draw_samples(recipe: Recipe, config: ViTConfig, plain: int, further: int) -> Samples:
    """Draw what `plain` SGD steps and `further` steps of the recipe take."""
    batch, draws = recipe.train.batch_size, torch.Generator().manual_seed(recipe.train.seed)
    shape = (config.channels, config.image_size, config.image_size)
    first = [
        (
            torch.randn(batch, *shape, generator=draws),
            torch.randint(0, config.num_classes, (batch,), generator=draws),
            torch.randint(0, 2**62, (batch,), generator=draws),
        )
        for _ in range(plain)
    ]
    count = batch * max(1, further)
    order, mix = order_of(recipe, count), mixing(recipe)
    pixels = torch.randint(0, 256, (count, *shape), generator=draws, dtype=torch.uint8)
    labels = torch.randint(0, config.num_classes, (count,), generator=draws)
    then, mixed = [], []
    for step in range(further):
        epochs, samples, repeats = order.batch(step * batch, batch)
        keys = sample_keys(recipe.train.seed, epochs, samples, repeats)
        chosen = torch.from_numpy(samples)
        then.append((pixels[chosen], labels[chosen], torch.from_numpy(keys)))
        mixed.append(mix(keys, config.image_size) if mix else None)
    return Samples(first, then, mixed)
