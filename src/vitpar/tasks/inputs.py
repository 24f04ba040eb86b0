"""The input that a task reads, that of several crops of each image, and the rate at which CPUs prepare images."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from torch import Tensor

from vitpar.data.loader import Batch, LoaderSettings, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.policies import Distortions
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import DataError, RecipeError
from vitpar.launch.resources import cpu_cores
from vitpar.models.config import ModelConfig
from vitpar.models.dino.config import GLOBAL, DINOConfig
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.recipe.sections.input import TEXT
from vitpar.tasks.data import transforms
from vitpar.tasks.dino import DINO
from vitpar.tasks.image_input import ImageInput
from vitpar.tasks.input import Input, TextInput
from vitpar.tasks.known import task_of
from vitpar.tasks.task import StepInput, Task
from vitpar.tasks.text import TextTask

TRIED = 16
"""Images that are prepared at a time."""
LEAST_S, MOST_S = 0.3, 2.0
"""Seconds of computing after which it is enough, and seconds of the clock, since storage may be slow."""


def crop_transforms(base: TrainTransform, task: DINO, config: DINOConfig) -> list[TrainTransform]:
    """Return the transform of each crop of an image. base: that of the recipe."""
    made: list[TrainTransform] = []
    for crops, scale in zip(config.crops, (base.scale, task.local_crops_scale), strict=False):
        for _ in range(crops.count):
            number = min(len(made), GLOBAL)
            policy = base.policy or Distortions(task.blur[number], task.solarize * (number == 1))
            made.append(replace(base, size=crops.size, scale=scale, policy=policy))
    return made


class CropInput(ImageInput):
    """Input of crops for one rank of `model`, which has those of the student and the teacher in one row of pixels.

    Crops are distorted as in DINOv2, unless the recipe names a policy. Each crop is a view of the image that is decoded
    once (``vitpar.data.loader.Loader``). Masks are on every rank, those of other samples than the rank's empty.
    """

    def __init__(self, recipe: Recipe, model: ParallelModel, task: DINO) -> None:
        super().__init__(recipe, model, task)
        if recipe.data.bad_sample == "skip":
            raise RecipeError(
                f"data.bad_sample is 'skip', but task '{task.NAME}' has no labels by which images would not count: "
                "leave it out"
            )
        config = model.config.unadapted
        assert isinstance(config, DINOConfig), "the task has been compared with the model"
        self._crops = config.crops
        assert isinstance(self._train, TrainTransform)
        self._train = crop_transforms(self._train, task, config)
        outputs = model.output_rows(model.batch_size) if model.gives_outputs else []
        self._masked_rows = sorted({*self._rows, *outputs})

    def train_step(self, batch: Batch) -> StepInput:
        _, keys = self._labels_and_keys(batch)
        images = None
        if self._model.takes_images:
            sizes = [crops.size for crops in self._crops for _ in range(crops.count)]
            made = zip((batch.images, *batch.further), sizes, strict=True)
            views = [self._gathered(view, size, len(self._decoded)) for view, size in made]
            compute = self._model.precision.compute
            images = torch.cat([self.normalize(view, compute).flatten(2) for view in views], dim=2)
        return self._given(images, keys, batch.keys)

    def _given(self, images: Tensor | None, keys: Tensor, on_host: Tensor) -> StepInput:
        """Return the input of a step.

        images: pixels of all crops of each of this rank's images.
        on_host: the same `keys`, so that the host need not wait for the device.
        """
        made = self.task.sides(on_host, self._masked_rows, self._model.config)
        sides = {name: self.to_device(side) for name, side in made.items()}
        return StepInput(images, torch.zeros(0, device=keys.device), keys, sides)

    def synthetic(self) -> StepInput:
        model = self._model
        images = None
        if model.takes_images:
            images = torch.randn(len(self._rows), *model.config.input.shape, device=model.device)
            images = images.to(model.precision.compute)
        keys = torch.arange(model.batch_size)
        return self._given(images, keys.to(model.device), keys)


def build_input(recipe: Recipe, model: ParallelModel, task: Task, teacher: ParallelModel | None = None) -> Input:
    """Return the input of this rank of `model`. Collective. Raises ModelError for a model that takes another input.

    teacher: takes images too; None for none.
    """
    if isinstance(task, DINO):
        return CropInput(recipe, model, task)
    if isinstance(task, TextTask):
        return TextInput(recipe, model, task)
    return ImageInput(recipe, model, task, teacher)


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
