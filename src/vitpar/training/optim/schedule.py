"""Learning rates and weight decays over the steps of a run.

A learning rate has a linear warm-up, then a shape such as `cosine` or `step(every=30 epochs)`.

| shape | arguments | rate after the warm-up |
|---|---|---|
| constant | | the largest |
| linear | | straight down to the least |
| cosine | `cycles`, `decay` | half a cosine to the least, `cycles` times, from `decay` times the largest before |
| polynomial | `power` | least + (largest - least) · (1 - progress) ** power |
| step | `every`, `gamma` | times `gamma` after every `every` |
| multistep | `at`, `gamma` | times `gamma` at each interval of the list `at` |
| rsqrt | `timescale`, `decay` | largest · √(timescale / (timescale + steps)); straight down in the last part, `decay` |
| wsd | `decay`, `form` | the largest, then down to the least in the last part, `decay`: 1-sqrt, linear or cosine |

`step` and `multistep` count from the beginning of the run, the others from the end of the warm-up.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from vitpar.intervals import NOTHING, Interval
from vitpar.text import count, nearest, shown

_FIFTH = Interval(20.0, "percent")


@dataclass(frozen=True)
class Run:
    """Lengths of a run, which intervals refer to."""

    samples: int
    """Samples of the training set."""
    batch_size: int
    """Samples of a step."""
    steps: int
    """Steps of the run."""

    @property
    def epoch(self) -> float:
        """Steps of an epoch, with a fraction."""
        return self.samples / self.batch_size

    def length(self, interval: Interval) -> int:
        """Return an interval in steps."""
        return interval.steps(samples=self.samples, batch_size=self.batch_size, total=self.steps)


@dataclass(frozen=True)
class Course:
    """Where a step is in a run."""

    run: Run
    at: float
    """Steps since the shape began; a fraction only between epochs of a rate that changes once an epoch."""
    length: float
    """Steps of the shape."""
    warmup: int
    """Steps of warm-up."""


@dataclass(frozen=True)
class Shape:
    """Base of shapes. Fields are the arguments that a recipe may give."""

    NAME: ClassVar[str] = ""
    AFTER_WARMUP: ClassVar[bool] = True
    """Whether it begins after the warm-up, rather than with the run."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        """Return the learning rate. peak: the largest. least: that at the end."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Shape):
    """The largest rate throughout."""

    NAME: ClassVar[str] = "constant"

    def rate(self, course: Course, peak: float, least: float) -> float:
        return peak


@dataclass(frozen=True)
class Polynomial(Shape):
    """A power of the steps that are left."""

    NAME: ClassVar[str] = "polynomial"
    power: float = 1.0
    """Exponent, above 0."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        return least + (peak - least) * (1 - course.at / course.length) ** self.power


@dataclass(frozen=True)
class Linear(Shape):
    """A straight line."""

    NAME: ClassVar[str] = "linear"

    def rate(self, course: Course, peak: float, least: float) -> float:
        return Polynomial().rate(course, peak, least)


@dataclass(frozen=True)
class Cosine(Shape):
    """Half a cosine, once or several times (1608.03983)."""

    NAME: ClassVar[str] = "cosine"
    cycles: int = 1
    """Number of falls, of equal length."""
    decay: float = 1.0
    """Largest rate of a fall, relative to that of the one before."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        place = course.at * self.cycles / course.length
        cycle = min(int(place), self.cycles - 1)
        return least + (peak * self.decay**cycle - least) * (1 + math.cos(math.pi * (place - cycle))) / 2


@dataclass(frozen=True)
class Step(Shape):
    """Falls by a factor at equal distances."""

    NAME: ClassVar[str] = "step"
    AFTER_WARMUP: ClassVar[bool] = False
    every: Interval
    """Distance between falls."""
    gamma: float = 0.1
    """Factor of a fall."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        return max(least, peak * self.gamma ** (math.ceil(course.at) // max(1, course.run.length(self.every))))


@dataclass(frozen=True)
class MultiStep(Shape):
    """Falls by a factor at given points."""

    NAME: ClassVar[str] = "multistep"
    AFTER_WARMUP: ClassVar[bool] = False
    at: tuple[Interval, ...]
    """Points of falls."""
    gamma: float = 0.1
    """Factor of a fall."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        points = sorted(map(course.run.length, self.at))
        return max(least, peak * self.gamma ** bisect_right(points, math.ceil(course.at)))


@dataclass(frozen=True)
class WSD(Shape):
    """Warm-up, stable, decay (2404.06395): the largest rate, then a fall to the least."""

    NAME: ClassVar[str] = "wsd"
    decay: Interval = _FIFTH
    """Last part of the run, in which the rate falls."""
    form: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    """Form of the fall (2405.18392)."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        decay = min(course.run.length(self.decay), course.length)
        fallen = max(0.0, 1 - (course.length - course.at) / decay) if decay else 0.0
        share = {"1-sqrt": 1 - math.sqrt(fallen), "linear": 1 - fallen, "cosine": (1 + math.cos(math.pi * fallen)) / 2}
        return least + (peak - least) * share[self.form]


@dataclass(frozen=True)
class RSqrt(Shape):
    """The inverse of a square root, then a straight line to the least rate if `decay` is above 0 (2106.04560)."""

    NAME: ClassVar[str] = "rsqrt"
    timescale: Interval | None = None
    """Steps after which the rate is the largest over √2; those of the warm-up if unset, or 10,000 without one."""
    decay: Interval = NOTHING
    """Last part of the run, in which the rate falls to the least."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        scale = (course.run.length(self.timescale) if self.timescale else course.warmup) or 10_000
        rate = max(least, peak * math.sqrt(scale / (scale + course.at)))
        return WSD(self.decay, "linear").rate(course, rate, least)


SHAPES = {one.NAME: one for one in (Constant, Linear, Cosine, Polynomial, Step, MultiStep, RSqrt, WSD)}
"""Shapes by name."""
_COSINE = Cosine()
_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]{0,400})\))?\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"\s*([a-z_]+)\s*=\s*(\[[^\[\]]*\]|[^,=\[\]]+?)\s*(?:,|$)", re.IGNORECASE)


def parse_shape(text: str) -> Shape:
    """Return the shape that text such as `wsd(decay=10 %, form=linear)` describes.

    Raises ValueError.
    """
    found = _CALL.fullmatch(text)
    if found is None:
        raise ValueError(f"'{shown(text)}' is no shape: give a name with arguments, as in step(every=30 epochs)")
    name, inner = found[1], (found[2] or "").strip()
    if name not in SHAPES:
        raise ValueError(f"'{shown(name)}' is no shape{nearest(name, SHAPES)}: the shapes are {', '.join(SHAPES)}")
    shape, values, end = SHAPES[name], dict[str, Any](), 0
    kinds = {field.name: get_type_hints(shape)[field.name] for field in fields(shape)}
    for match in _ARGUMENT.finditer(inner):
        key = match[1]
        if match.start() != end or key not in kinds or key in values:
            break
        values[key], end = _value(f"{name}'s {key}", kinds[key], match[2]), match.end()
    if end != len(inner):
        takes = f"takes {', '.join(kinds)}" if kinds else "takes no arguments"
        raise ValueError(f"'{shown(inner[end:])}' is not understood in '{shown(text)}': {name} {takes}, as in a=1, b=2")
    if missing := [one.name for one in fields(shape) if one.default is MISSING and one.name not in values]:
        raise ValueError(f"{name} needs {missing[0]}: write {name}({missing[0]}={_EXAMPLES[missing[0]]})")
    return shape(**values)


_EXAMPLES = {"every": "30 epochs", "at": "[30 epochs, 60 epochs]"}


def _value(what: str, kind: Any, text: str) -> Any:
    """Return an argument of a shape."""
    if get_args(kind) and all(isinstance(choice, str) for choice in get_args(kind)):
        if text not in get_args(kind):
            raise ValueError(f"{what} is '{shown(text)}': give one of {', '.join(get_args(kind))}")
        return text
    if kind == tuple[Interval, ...]:
        if not (text.startswith("[") and text[1:-1].strip()):
            raise ValueError(f"{what} is '{shown(text)}', which is no list: write [30 epochs, 60 epochs]")
        return tuple(_interval(what, one) for one in text[1:-1].split(","))
    if kind is int or kind is float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not 0 < number <= 1000:
            whole = "whole " if kind is int else ""
            raise ValueError(f"{what} is '{shown(text)}': give a {whole}number above 0, of at most 1000")
        return number
    return _interval(what, text)


def _interval(what: str, text: str) -> Interval:
    """Return an argument that is an interval."""
    try:
        return Interval.of(text.strip()).in_steps()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate of each update of a run."""

    run: Run
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
    def _after(self) -> bool:
        return self.shape.AFTER_WARMUP if self.after_warmup is None else self.after_warmup

    @property
    def warning(self) -> str | None:
        """Warning if the run ends before the warm-up, else None."""
        if self.warmup_steps < self.run.steps:
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
        begun = warmup if self._after else 0.0
        length = max(1.0, steps - begun)
        return self.shape.rate(
            Course(self.run, min(done - begun, length), length, self.warmup_steps), self.peak, self.least
        )

    def _epochs(self, steps: float) -> float:
        """Return a number of steps without the rounding of whole epochs to whole steps."""
        whole = round(steps / self.run.epoch) * self.run.epoch
        return whole if abs(whole - steps) < 1 else steps


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay of each update of a run: half a cosine over all updates, as in DINO (2104.14294)."""

    run: Run
    first: float
    """Weight decay of the first update."""
    last: float
    """Weight decay at the end. The last update is one step before it."""

    def __call__(self, step: int) -> float:
        """Return the weight decay of update number `step`, counted from 1."""
        return _COSINE.rate(Course(self.run, step - 1, self.run.steps, 0), self.first, self.last)
