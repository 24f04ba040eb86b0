"""Everything that changes over the updates of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vitpar.errors import ModelError, RecipeError
from vitpar.models.config import ModelConfig
from vitpar.recipe.rates.schedule import LRSchedule, parse_drop_path, parse_image_sizes
from vitpar.recipe.rates.shapes import Cosine, Course, RunLengths
from vitpar.recipe.recipe import Recipe
from vitpar.text import count, shown

MOST_SIZES = 4
"""Most image sizes of a run besides that of the model."""


@dataclass(frozen=True)
class Schedules:
    """Schedules of a run."""

    lr: LRSchedule
    """Learning rate."""
    named: Mapping[str, Callable[[int], float]]
    """Functions of the number of an update, counted from 1, by the name of what else changes: `weight_decay`,
    `ema_decay`, `drop_path` (of the last block), `image_size` (in pixels)."""
    drop_share: Callable[[int], float] | None
    """Part of the model's rates of stochastic depth in an update, from 0 to 1; None if it is constant."""

    @classmethod
    def of(cls, recipe: Recipe, samples: int, config: ModelConfig) -> Schedules:
        """Return the schedules of a recipe for a training set of `samples` and a model.

        Raises RecipeError for settings that the model does not support, or that do not fit the run.
        """
        run, named, share = recipe.lengths(samples), dict[str, Callable[[int], float]](), None
        first, last = recipe.optimizer.weight_decay, recipe.optimizer.weight_decay_end
        if last is not None:  # half a cosine over all updates, as in DINO (2104.14294)
            named["weight_decay"] = lambda step: Cosine().rate(Course(run, step - 1, run.steps, 0), first, last)
        begin, end = recipe.train.ema_decay, recipe.train.ema_decay_end
        if begin is not None and end is not None:
            named["ema_decay"] = lambda step: Cosine().rate(Course(run, step - 1, run.steps, 0), begin, end)
        if (text := recipe.train.drop_path_schedule) != "constant":
            share = _drop_share(text, run, config)
            named["drop_path"] = lambda step: config.drop_path * share(step)  # type: ignore[attr-defined]
        if recipe.train.image_sizes is not None:
            named["image_size"] = _image_size(recipe.train.image_sizes, run, config)
        return cls(recipe.learning_rate(samples), named, share)

    @property
    def sizes(self) -> Callable[[int], int] | None:
        """Function from the samples seen before a batch to the side of its images, in pixels; None if constant."""
        size, images = self.named.get("image_size"), self.lr.run.batch_size
        return None if size is None else lambda seen: int(size(seen // images + 1))

    def others(self, step: int) -> dict[str, float]:
        """Return the values of `named` in update number `step`."""
        return {name: schedule(step) for name, schedule in self.named.items()}


def _drop_share(text: str, run: RunLengths, config: ModelConfig) -> Callable[[int], float]:
    if not getattr(config, "drop_path", 0.0):
        raise RecipeError(
            f"train.drop_path_schedule is '{shown(text)}', but {config.name} has no stochastic depth: set "
            "model.drop_path, or leave it out"
        )
    shape = parse_drop_path(text)
    return lambda step: shape.share(step - 1, run)


def _image_size(text: str, run: RunLengths, config: ModelConfig) -> Callable[[int], int]:
    parts = parse_image_sizes(text)
    if len(parts) > MOST_SIZES:
        raise RecipeError(
            f"train.image_sizes has {len(parts)} sizes, each of which blocks and pipelines are set up for: give "
            f"at most {MOST_SIZES}"
        )
    ends = [run.length(end) for _, end in parts]
    if ends != sorted(set(ends)) or not 0 < ends[0] <= ends[-1] < run.steps:
        raise RecipeError(
            f"the parts of train.image_sizes '{shown(text)}' end after {', '.join(map(str, ends))} of "
            f"{count(run.steps, 'step')}: let each end after the one before it, and the last before the run"
        )
    for size, _ in parts:
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
    return lambda step: next(
        (size for (size, _), end in zip(parts, ends, strict=True) if step <= end), config.image_size
    )
