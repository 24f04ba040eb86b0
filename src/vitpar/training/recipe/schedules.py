"""Everything that changes over the updates of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vitpar.errors import ModelError, RecipeError
from vitpar.models.config import ModelConfig
from vitpar.text import count, shown
from vitpar.training.optim.schedule import (
    DropPathSchedule,
    ImageSizes,
    ImageSizeSchedule,
    LRSchedule,
    WeightDecaySchedule,
    parse_drop_path,
)
from vitpar.training.optim.shapes import RunLengths
from vitpar.training.recipe.recipe import Recipe

MOST_SIZES = 4
"""Most image sizes of a run besides that of the model."""


@dataclass(frozen=True)
class Schedules:
    """Schedules of a run; None for what is constant."""

    lr: LRSchedule
    """Learning rate."""
    weight_decay: WeightDecaySchedule | None
    """Weight decay."""
    drop_path: DropPathSchedule | None
    """Stochastic depth of the last block."""
    image_size: ImageSizeSchedule | None
    """Side of the training images, in pixels."""

    @classmethod
    def of(cls, recipe: Recipe, samples: int, config: ModelConfig) -> Schedules:
        """Return the schedules of a recipe for a training set of `samples` and a model.

        Raises RecipeError for settings that do nothing, or that the model does not support.
        """
        run, optimizer = recipe.lengths(samples), recipe.optimizer
        first, last = optimizer.weight_decay, optimizer.weight_decay_end
        return cls(
            recipe.learning_rate(samples),
            None if last is None else WeightDecaySchedule(run, first, last),
            _drop_path(recipe.train.drop_path_schedule, run, config),
            None if recipe.train.image_sizes is None else _image_size(recipe.train.image_sizes, run, config),
        )

    @property
    def sizes(self) -> Callable[[int], int] | None:
        """Function from the samples seen before a batch to the side of its images, in pixels; None if constant."""
        size = self.image_size
        return None if size is None else lambda seen: size(seen // size.run.batch_size + 1)

    def other(self, name: str, step: int) -> float:
        """Return the value of `others` called `name`."""
        return self.others(step)[name]

    def others(self, step: int) -> dict[str, float]:
        """Return the values of update number `step` by name, without the learning rate and what is constant."""
        named = {"weight_decay": self.weight_decay, "drop_path": self.drop_path, "image_size": self.image_size}
        return {name: schedule(step) for name, schedule in named.items() if schedule}


def _drop_path(text: str, run: RunLengths, config: ModelConfig) -> DropPathSchedule | None:
    most = getattr(config, "drop_path", 0.0)
    if text == "constant":
        return None
    if not most:
        raise RecipeError(
            f"train.drop_path_schedule is '{shown(text)}', but {config.name} has no stochastic depth: set "
            "model.drop_path, or leave it out"
        )
    return DropPathSchedule(run, parse_drop_path(text), most)


def _image_size(text: str, run: RunLengths, config: ModelConfig) -> ImageSizeSchedule:
    sizes = ImageSizes.of(text)
    if len(sizes.parts) > MOST_SIZES:
        raise RecipeError(
            f"train.image_sizes has {len(sizes.parts)} sizes, each of which blocks and pipelines are set up for: give "
            f"at most {MOST_SIZES}"
        )
    ends = [run.length(end) for _, end in sizes.parts]
    if ends != sorted(set(ends)) or not 0 < ends[0] <= ends[-1] < run.steps:
        raise RecipeError(
            f"the parts of train.image_sizes '{shown(text)}' end after {', '.join(map(str, ends))} of "
            f"{count(run.steps, 'step')}: let each end after the one before it, and the last before the run"
        )
    for size, _ in sizes.parts:
        if size >= config.image_size:
            raise RecipeError(
                f"train.image_sizes has {size} pixels, but images of {config.name} have {config.image_size}: give "
                "smaller sizes, or set model.image_size"
            )
        try:
            taken = config.resized(size)
        except ModelError as error:
            raise RecipeError(f"train.image_sizes: {error}") from None
        if taken is None:
            raise RecipeError(
                f"train.image_sizes is '{shown(text)}', but {config.name} takes images of one size only: leave it out"
            )
    return ImageSizeSchedule(run, sizes, config.image_size)
