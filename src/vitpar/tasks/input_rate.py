"""Rate at which the CPUs of a machine prepare training images."""

from __future__ import annotations

import time
from itertools import cycle

from vitpar.data.images import decode
from vitpar.data.randomness import Draws
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.launch.resources import cpu_cores
from vitpar.tasks.image_input import transforms
from vitpar.training.recipe import Recipe
from vitpar.training.recipe.sections import TEXT

TRIED = 64
"""Images that are prepared in turn, spread over the training set."""
LEAST_S, MOST_S = 0.3, 2.0
"""Seconds of computing after which it is enough, and seconds of the clock, since storage may be slow."""


def input_rate(recipe: Recipe, size: int) -> float | None:
    """Return the images that all cores of this machine read, decode and transform in a second, if nothing else runs.

    size: side of the model's images, in pixels

    None for text, streams, decoded images that are kept, and data that cannot be read. Python's lock may limit it
    further (docs/speed.md).
    """
    data = recipe.data
    if data.path is None or data.cache != "none" or recipe.task.name in TEXT:
        return None
    transform, done = transforms(recipe, size)[0], 0
    try:
        shards, until = ShardSet.open(data.path, "train"), time.monotonic() + MOST_S
        begun = time.process_time()
        for i in cycle(range(0, len(shards), max(1, len(shards) // TRIED))):
            transform(decode(shards.read(i)), Draws(i))
            done += 1
            if (spent := time.process_time() - begun) > LEAST_S or time.monotonic() > until:
                return done / spent * cpu_cores()
    except DataError:  # training reports it
        pass
    return None
