"""Learning rate over the steps of a run, and how recipes write courses of drop-path and image size.

A learning rate has a linear warm-up, then a shape (``vitpar.recipe.rates.shapes``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from vitpar.intervals import NOTHING, Interval
from vitpar.recipe.rates.called import Called, Steps, parse_call
from vitpar.recipe.rates.shapes import Cosine, Course, RunLengths, Shape
from vitpar.text import count, shown

TRIAL_STEPS = 50
"""Steps of a run below which it is a trial, which may end before the warm-up."""
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

    NAME: ClassVar[str] = "constant"

    def share(self, done: int, run: RunLengths) -> float:
        """Return the part of the model's rates, from 0 to 1, in the update after `done` updates."""
        return 1.0


class EarlyDropPath(DropPathShape):
    """Stochastic depth at the beginning of a run, for models that underfit."""

    NAME: ClassVar[str] = "early"
    until: Steps
    """Part of the run with stochastic depth."""
    form: Literal["constant", "linear"] = "constant"
    """Whether the rates stay, or fall to 0 at the last update of that part."""

    def share(self, done: int, run: RunLengths) -> float:
        length = run.length(self.until)
        if done >= length:
            return 0.0
        return 1.0 if self.form == "constant" or length == 1 else 1 - done / (length - 1)


class LateDropPath(DropPathShape):
    """Stochastic depth after the beginning of a run, for models that overfit."""

    NAME: ClassVar[str] = "late"
    after: Steps
    """Part of the run without stochastic depth."""

    def share(self, done: int, run: RunLengths) -> float:
        return float(done >= run.length(self.after))


_DROP_PATHS: dict[str, type[DropPathShape]] = {one.NAME: one for one in (DropPathShape, EarlyDropPath, LateDropPath)}


def parse_drop_path(text: str) -> DropPathShape:
    """Return the course of stochastic depth that text such as `early(until=50 epochs, form=linear)` describes.

    Raises ValueError.
    """
    return parse_call(text, _DROP_PATHS, "course of drop-path", "early(until=50 epochs)")


_SIZED = re.compile(r"\s*([0-9]{1,6})\s+until\s+([^,]+)")


def parse_image_sizes(text: str) -> tuple[tuple[int, Interval], ...]:
    """Return size in pixels and end of each part of a run that text such as `128 until 40 %, 192 until 80 %` describes.

    Raises ValueError.
    """
    parts = []
    for given in text.split(","):
        if (found := _SIZED.fullmatch(given)) is None:
            raise ValueError(f"'{shown(given)}' is no size with an end: write 128 until 40 %, 192 until 80 %")
        parts.append((int(found[1]), Interval.of(found[2].strip()).in_steps()))
    return tuple(parts)
