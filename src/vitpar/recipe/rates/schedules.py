"""All that changes over the updates of a run: learning rate, weight decay, averages, drop-path and image size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from vitpar.errors import ModelError, RecipeError
from vitpar.intervals import NOTHING, Interval
from vitpar.models.config import ModelConfig
from vitpar.recipe.rates.shapes import Called, Cosine, Course, RunLengths, Shape, Steps, parse_call
from vitpar.text import count, shown

if TYPE_CHECKING:
    from vitpar.recipe.recipe import Recipe

TRIAL_STEPS = 50
"""Steps of a run below which it is a trial, which may end before the warm-up."""
MOST_SIZES = 4
"""Most image sizes of a run besides that of the model."""
_COSINE = Cosine()


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate of each update of a run."""

    run: RunLengths
    peak: float
    """Largest learning rate."""
    shape: Shape = _COSINE
    """Course after the warm-up."""
    warmup: Interval = NOTHING
    """Length of the warm-up."""
    warmup_lr: float | None = None
    """Rate of the first update; the largest over the steps of the warm-up if unset."""
    least: float = 0.0
    """Rate at the end. The last update is one step before it."""
    after_warmup: bool | None = None
    """Whether the shape begins after the warm-up, rather than with the run; as usual for the shape if unset."""
    per_epoch: bool = False
    """Whether the rate changes between epochs only."""

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return self.run.length(self.warmup)

    @property
    def warning(self) -> str | None:
        """Warning if the run ends before the warm-up, else None; none for a run of few steps, which is a trial."""
        if self.warmup_steps < self.run.steps or self.run.steps < TRIAL_STEPS:
            return None
        warmup = count(self.warmup_steps, "step")
        return f"the warm-up of {warmup} is as long as the run or longer: the learning rate never falls"

    def __call__(self, step: int) -> float:
        """Return the learning rate of update number `step`, counted from 1."""
        done, warmup, steps = float(step - 1), float(self.warmup_steps), float(self.run.steps)
        if self.per_epoch:
            done = (step - 1) * self.run.batch_size // self.run.samples * self.run.epoch
            warmup, steps = self._epochs(warmup), self._epochs(steps)
        if done < warmup:
            if self.warmup_lr is None:
                return self.peak * (done + 1) / warmup
            return self.warmup_lr + (self.peak - self.warmup_lr) * done / warmup
        after = self.shape.AFTER_WARMUP if self.after_warmup is None else self.after_warmup
        begun = warmup if after else 0.0
        length = max(1.0, steps - begun)
        return self.shape.rate(
            Course(self.run, min(done - begun, length), length, self.warmup_steps), self.peak, self.least
        )

    def _epochs(self, steps: float) -> float:
        """Return a number of steps without the rounding of whole epochs to whole steps."""
        whole = round(steps / self.run.epoch) * self.run.epoch
        return whole if abs(whole - steps) < 1 else steps


class DropPathShape(Called):
    """Base of the courses of stochastic depth: the rates of the model throughout (arXiv 2303.01500)."""

    def share(self, run: RunLengths, step: int) -> float:
        """Return the part of the model's rates, from 0 to 1, in update number `step`, counted from 1."""
        return 1.0


class EarlyDropPath(DropPathShape):
    """Stochastic depth at the beginning of a run, for models that underfit."""

    until: Steps
    """Part of the run with stochastic depth."""
    form: Literal["constant", "linear"] = "constant"
    """Whether the rates stay, or fall to 0 at the last update of that part."""

    def share(self, run: RunLengths, step: int) -> float:
        length = run.length(self.until)
        if step > length:
            return 0.0
        return 1.0 if self.form == "constant" or length == 1 else 1 - (step - 1) / (length - 1)


class LateDropPath(DropPathShape):
    """Stochastic depth after the beginning of a run, for models that overfit."""

    after: Steps
    """Part of the run without stochastic depth."""

    def share(self, run: RunLengths, step: int) -> float:
        return float(step > run.length(self.after))


_DROP_PATHS: dict[str, type[DropPathShape]] = {"constant": DropPathShape, "early": EarlyDropPath, "late": LateDropPath}


def parse_drop_path(text: str) -> DropPathShape:
    """Return the course that `early(until=50 epochs, form=linear)` describes. Raises ValueError."""
    return parse_call(text, _DROP_PATHS, "course of drop-path", "early(until=50 epochs)")


_SIZED = re.compile(r"\s*([0-9]{1,6})\s+until\s+([^,]+)")


def parse_image_sizes(text: str) -> tuple[tuple[int, Interval], ...]:
    """Return sizes in pixels and ends of `128 until 40 %, 192 until 80 %`. Raises ValueError."""
    parts = []
    for given in text.split(","):
        if (found := _SIZED.fullmatch(given)) is None:
            raise ValueError(f"'{shown(given)}' is no size with an end: write 128 until 40 %, 192 until 80 %")
        parts.append((int(found[1]), Interval.of(found[2].strip()).in_steps()))
    return tuple(parts)


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
            if not getattr(config, "drop_path", 0.0):
                raise RecipeError(
                    f"train.drop_path_schedule is '{shown(text)}', but {config.name} has no stochastic depth: set "
                    "model.drop_path, or leave it out"
                )
            shape, rate = parse_drop_path(text), config.drop_path  # type: ignore[attr-defined]
            share = partial(shape.share, run)
            named["drop_path"] = lambda step: rate * shape.share(run, step)
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
