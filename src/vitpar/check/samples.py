"""Random samples of a check, equal on all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vitpar.data.randomness import sample_keys
from vitpar.data.transforms.batch import Mixed
from vitpar.models.config import ModelConfig
from vitpar.recipe import Recipe
from vitpar.tasks import Task
from vitpar.tasks.data import mixing, order_of
from vitpar.tasks.text import TextTask


@dataclass(frozen=True)
class Drawn:
    """Samples of one step, for all ranks. All differ, so that a micro-batch or slice that is used twice is found."""

    inputs: Tensor
    """Images, float32 [batch, channels, size, size], or token ids, int64 [batch, tokens]."""
    labels: Tensor
    """Labels, int64 [batch], or ids to predict, int64 [batch, tokens]."""
    keys: Tensor
    """Random keys, int64 [batch]."""
    sides: Mapping[str, Tensor] = field(default_factory=dict)
    """Further inputs of the model by name."""


@dataclass(frozen=True)
class Pixels:
    """Images of one step of the recipe, before they are normalised and mixed."""

    images: Tensor
    """Images, uint8 [batch, channels, size, size]. Repeats of a sample follow each other, as many as the recipe sets.
    """
    labels: Tensor
    """Labels, int64 [batch]."""
    keys: Tensor
    """Random keys, int64 [batch]."""
    mixed: Mixed | None
    """Mixing of the images; None for no mixing."""


@dataclass(frozen=True)
class Samples:
    """Input of all steps of a check."""

    plain: list[Drawn]
    """Samples of the SGD steps."""
    further: Sequence[Drawn | Pixels]
    """Samples of the steps of the recipe."""


def draw_samples(recipe: Recipe, config: ModelConfig, task: Task, plain: int, further: int) -> Samples:
    """Draw the input of `plain` SGD steps and of `further` steps of the recipe."""
    draws = torch.Generator().manual_seed(recipe.train.seed)
    text = isinstance(task, TextTask)
    if text or task.teacher_config(config) is not None:
        steps = [(_text if text else _images)(recipe, config, task, draws) for _ in range(plain + further)]
        return Samples(steps[:plain], steps[plain:])
    return Samples(
        [_images(recipe, config, task, draws) for _ in range(plain)], _pixels(recipe, config, task, further, draws)
    )


def _images(recipe: Recipe, config: ModelConfig, task: Task, draws: torch.Generator) -> Drawn:
    batch = recipe.train.batch_size
    images = torch.randn(batch, *config.input.shape, generator=draws)
    labels = torch.randint(0, task.labels.count, (batch,), generator=draws)
    keys = torch.randint(0, 2**62, (batch,), generator=draws)
    return Drawn(images, labels, keys, task.sides(keys, range(batch), config))


def _text(recipe: Recipe, config: ModelConfig, task: Task, draws: torch.Generator) -> Drawn:
    """Return masked sequences of different lengths. They are masked by the task, whose masking has tests of its own."""
    assert isinstance(task, TextTask)
    text, batch = task.text, recipe.train.batch_size
    plain = torch.from_numpy(np.setdiff1d(np.arange(text.vocab_size), text.specials.all))
    ids = plain[torch.randint(0, len(plain), (batch, text.tokens), generator=draws)]
    lengths = torch.randint(max(1, text.tokens // 2), text.tokens + 1, (batch,), generator=draws)
    ids[torch.arange(text.tokens) >= lengths[:, None]] = text.specials.padding
    keys = torch.randint(0, 2**62, (batch,), generator=draws)
    given = task.given(task.prepare(ids.numpy(), lengths.numpy(), keys.numpy()), config)
    assert given.images is not None, "`given` returns all inputs"
    return Drawn(given.images, given.targets, keys, given.sides)


def _pixels(recipe: Recipe, config: ModelConfig, task: Task, further: int, draws: torch.Generator) -> list[Pixels]:
    batch = recipe.train.batch_size
    count = batch * max(1, further)
    order, mix = order_of(recipe, count), mixing(recipe)
    shape = (count, config.channels, config.image_size, config.image_size)
    pixels = torch.randint(0, 256, shape, generator=draws, dtype=torch.uint8)
    labels = torch.randint(0, task.labels.count, (count,), generator=draws)
    steps = []
    for step in range(further):
        epochs, samples, repeats = order.batch(step * batch, batch)
        keys = sample_keys(recipe.train.seed, epochs, samples, repeats)
        chosen = torch.from_numpy(samples)
        mixed = mix(keys, config.image_size) if mix else None
        steps.append(Pixels(pixels[chosen], labels[chosen], torch.from_numpy(keys), mixed))
    return steps
