"""The input that a task reads, and that of several crops of each image, for self-distillation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitpar.data.loader import Batch
from vitpar.data.transforms.policies import Distortions
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import RecipeError
from vitpar.models.dino.config import GLOBAL, DINOConfig
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.tasks.dino import DINO
from vitpar.tasks.image_input import ImageInput
from vitpar.tasks.input import Input, TextInput
from vitpar.tasks.task import StepInput, Task
from vitpar.tasks.text import TextTask


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
