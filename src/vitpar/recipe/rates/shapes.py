"""Shapes of a learning rate after its warm-up, by name.

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

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from vitpar.intervals import NOTHING, Interval
from vitpar.text import nearest, shown

_FIFTH = Interval(20.0, "percent")
_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]{0,400})\))?\s*", re.IGNORECASE)
_ARGUMENT = re.compile(r"\s*([a-z_]+)\s*=\s*(\[[^\[\]]*\]|[^,=\[\]]+?)\s*(?:,|$)", re.IGNORECASE)
Steps = Annotated[Interval, AfterValidator(Interval.in_steps)]
"""Interval whose number of steps is known."""
Number = Annotated[float, Field(gt=0, le=1000)]
Count = Annotated[int, Field(gt=0, le=1000)]


class Called(BaseModel):
    """Base of what recipes write as a name with arguments, such as `step(every=30 epochs)`: fields are arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True)


T = TypeVar("T", bound=Called)


def parse_call(text: str, classes: Mapping[str, type[T]], noun: str, example: str) -> T:
    """Return the object that text such as `wsd(decay=10 %, form=linear)` describes. Raises ValueError.

    classes: models of the arguments, by name.
    noun: word for one of them, for messages. example: of such a text.
    """
    found = _CALL.fullmatch(text)
    if found is None:
        raise ValueError(f"'{shown(text)}' is no {noun}: give a name with arguments, as in {example}")
    name, inner = found[1], found[2] or ""
    if name not in classes:
        raise ValueError(f"'{shown(name)}' is no {noun}{nearest(name, classes)}: give {', '.join(classes)}")
    pairs, takes = _ARGUMENT.findall(inner), ", ".join(classes[name].model_fields) or "no arguments"
    values = {key: given[1:-1].split(",") if given[0] == "[" else given for key, given in pairs}
    if _ARGUMENT.sub("", inner).strip() or len(values) < len(pairs):
        raise ValueError(f"'{shown(inner)}' is not understood in '{shown(text)}': {name} takes {takes}, as in a=1, b=2")
    try:
        return classes[name].model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        said = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"].lower()
        raise ValueError(f"{name}'s {first['loc'][0]}: {said} (it takes {takes}, as in {example})") from None


@dataclass(frozen=True)
class RunLengths:
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

    run: RunLengths
    at: float
    """Steps since the shape began; a fraction only between epochs of a rate that changes once an epoch."""
    length: float
    """Steps of the shape."""
    warmup: int
    """Steps of warm-up."""


class Shape(Called):
    """Base of shapes."""

    AFTER_WARMUP: ClassVar[bool] = True
    """Whether it begins after the warm-up, rather than with the run."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        """Return the learning rate. peak: the largest. least: that at the end."""
        raise NotImplementedError


class Constant(Shape):
    """The largest rate throughout."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        return peak


class Polynomial(Shape):
    """A power of the steps that are left."""

    power: Number = 1.0
    """Exponent, above 0."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        return least + (peak - least) * (1 - course.at / course.length) ** self.power


class Linear(Shape):
    """A straight line."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        return Polynomial().rate(course, peak, least)


class Cosine(Shape):
    """Half a cosine, once or several times (1608.03983)."""

    cycles: Count = 1
    """Number of falls, of equal length."""
    decay: Number = 1.0
    """Largest rate of a fall, relative to that of the one before."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        place = course.at * self.cycles / course.length
        cycle = min(int(place), self.cycles - 1)
        return least + (peak * self.decay**cycle - least) * (1 + math.cos(math.pi * (place - cycle))) / 2


class Step(Shape):
    """Falls by a factor at equal distances."""

    AFTER_WARMUP: ClassVar[bool] = False
    every: Steps
    """Distance between falls."""
    gamma: Number = 0.1
    """Factor of a fall."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        return max(least, peak * self.gamma ** (math.ceil(course.at) // max(1, course.run.length(self.every))))


class MultiStep(Shape):
    """Falls by a factor at given points."""

    AFTER_WARMUP: ClassVar[bool] = False
    at: tuple[Steps, ...] = Field(min_length=1)
    """Points of falls."""
    gamma: Number = 0.1
    """Factor of a fall."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        points = sorted(map(course.run.length, self.at))
        return max(least, peak * self.gamma ** bisect_right(points, math.ceil(course.at)))


class WSD(Shape):
    """Warm-up, stable, decay (2404.06395): the largest rate, then a fall to the least."""

    decay: Steps = _FIFTH
    """Last part of the run, in which the rate falls."""
    form: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    """Form of the fall (2405.18392)."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        decay = min(course.run.length(self.decay), course.length)
        fallen = max(0.0, 1 - (course.length - course.at) / decay) if decay else 0.0
        share = {"1-sqrt": 1 - math.sqrt(fallen), "linear": 1 - fallen, "cosine": (1 + math.cos(math.pi * fallen)) / 2}
        return least + (peak - least) * share[self.form]


class RSqrt(Shape):
    """The inverse of a square root, then a straight line to the least rate if `decay` is above 0 (2106.04560)."""

    timescale: Steps | None = None
    """Steps after which the rate is the largest over √2; those of the warm-up if unset, or 10,000 without one."""
    decay: Steps = NOTHING
    """Last part of the run, in which the rate falls to the least."""

    def rate(self, course: Course, peak: float, least: float) -> float:
        scale = (course.run.length(self.timescale) if self.timescale else course.warmup) or 10_000
        rate = max(least, peak * math.sqrt(scale / (scale + course.at)))
        return WSD(decay=self.decay, form="linear").rate(course, rate, least)


SHAPES: dict[str, type[Shape]] = {
    **{"constant": Constant, "linear": Linear, "cosine": Cosine, "polynomial": Polynomial},
    **{"step": Step, "multistep": MultiStep, "rsqrt": RSqrt, "wsd": WSD},
}
"""Shapes by name."""


def parse_shape(text: str) -> Shape:
    """Return the shape that text such as `wsd(decay=10 %, form=linear)` describes. Raises ValueError."""
    return parse_call(text, SHAPES, "shape", "step(every=30 epochs)")
