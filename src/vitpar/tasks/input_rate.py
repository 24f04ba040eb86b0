"""Rate at which the CPUs of a machine prepare training images."""

from __future__ import annotations

import time

import torch

from vitpar.data.loader import LoaderSettings, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.launch.resources import cpu_cores
from vitpar.models.config import ModelConfig
from vitpar.models.dino.config import DINOConfig
from vitpar.recipe import Recipe
from vitpar.recipe.sections.input import TEXT
from vitpar.tasks.data import transforms
from vitpar.tasks.dino import DINO
from vitpar.tasks.inputs import crop_transforms
from vitpar.tasks.known import task_of

TRIED = 16
"""Images that are prepared at a time."""
LEAST_S, MOST_S = 0.3, 2.0
"""Seconds of computing after which it is enough, and seconds of the clock, since storage may be slow."""


def input_rate(recipe: Recipe, config: ModelConfig, device_type: str) -> float | None:
    """Return the images that all cores of this machine read, decode and transform in a second, if nothing else runs.

    Of several crops, all are made of each image.

    config: model that takes the images.
    device_type: of the model's device. A GPU does itself what follows a crop.

    None for text, streams, images that are kept decoded or that a device decodes, and data that cannot be read.
    Python's lock may limit it further (docs/speed.md).
    """
    data = recipe.data
    if data.path is None or (data.cache, data.decode) != ("none", "host") or recipe.task.name in TEXT:
        return None
    settings: LoaderSettings = {"batch_size": TRIED, "workers": 0, "bad_sample": data.bad_sample}
    settings["device"] = torch.device(device_type)
    try:
        shards = ShardSet.open(data.path, "train")
        order = SampleOrder(recipe.train.seed, len(shards))
        task, shape, train = task_of(recipe, 1), config.unadapted, transforms(recipe, config.image_size)[0]
        several = isinstance(task, DINO) and isinstance(shape, DINOConfig) and crop_transforms(train, task, shape)
        loader = TrainLoader(shards, several or train, order=order, **settings)
        begun, until = time.process_time(), time.monotonic() + MOST_S
        for done, _ in enumerate(loader, start=1):
            if (spent := time.process_time() - begun) > LEAST_S or time.monotonic() > until:
                return done * TRIED / spent * cpu_cores()
    except DataError:  # training reports it
        pass
    return None
