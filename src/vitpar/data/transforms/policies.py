"""Augmentation policies: sequences of Pillow's image operations, each at a level from 0 to 10.

Policies have the names of timm, and of torchvision for CIFAR-10 and SVHN:

`rand-m9-n2-mstd0.5-inc1`   RandAugment (Cubuk et al. 2020)
`original`                  AutoAugment's policy for ImageNet (Cubuk et al. 2019, table 9)
`cifar10`, `svhn`           AutoAugment's policies for CIFAR-10 and SVHN (tables 7 and 8)
`3a`                        3-Augment (Touvron et al. 2022): grey, solarised or blurred

Names and ranges of operations are those of AutoAugment and RandAugment, with translations as fractions of the image's
size. A level gives the same argument as in timm. For some operations a higher level is a weaker change (Posterize), or
levels are changes in both directions around the middle (Color). With `increasing`, a higher level is always a stronger
change.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitpar.data.randomness import BatchDraws, Draws
from vitpar.data.transforms import policy_tables
from vitpar.errors import RecipeError
from vitpar.limits import MAX_POLICY_OPERATIONS
from vitpar.text import shown

Fill = tuple[int, int, int]
"""RGB colour, 0 to 255, of pixels that an operation moves in from outside the image."""
Size = tuple[int, int]
"""Width and height of an image in pixels."""
Step = dict[str, tuple[NDArray[np.int64], NDArray[Any]]]
"""Operations of one step of a batch by name: the rows that each changes, and the argument for each of them."""

HIGHEST = 10
"""Highest level of an operation."""
# Largest rotation in degrees, shear, and translation as a fraction of the image's size.
_DEGREES, _SHEAR, _TRANSLATION = 30.0, 0.3, 0.45


@dataclass(frozen=True)
class OperationContext:
    """Random numbers and arithmetic for the arguments of one image's operations."""

    draws: Any
    """Random numbers of the sample (`Draws`)."""
    fill: Fill
    """Colour of pixels from outside the image."""
    increasing: bool = False
    """Whether a higher level is always a stronger change."""

    def signed(self, value: Any) -> Any:
        """Return `value` or its negative, with equal probability."""
        return value if self.draws.uniform() < 0.5 else -value

    def truncated(self, value: Any) -> Any:
        """Return the integer part of `value`, which is not negative."""
        return int(value)

    def rounded(self, value: Any) -> Any:
        """Return the nearest integer; halves become even."""
        return round(value)

    def clipped(self, value: Any, low: float, high: float) -> Any:
        """Return the nearest number from `low` to `high`."""
        return min(max(value, low), high)


class BatchContext(OperationContext):
    """Random numbers (`BatchDraws`) and arithmetic for the arguments of many images' operations."""

    def signed(self, value: Any) -> Any:
        return np.where(self.draws.uniform() < 0.5, value, -value)

    def truncated(self, value: Any) -> Any:
        return np.asarray(value).astype(np.int64)

    def rounded(self, value: Any) -> Any:
        return np.rint(value).astype(np.int64)

    def clipped(self, value: Any, low: float, high: float) -> Any:
        return np.clip(value, low, high)


Argument = Callable[[Any, OperationContext, Size], Any]
"""Function from a level from 0 to HIGHEST, or one for each image, to the argument of an operation."""


@dataclass(frozen=True)
class Operation:
    """Operation on images at a level.

    The transforms of batches (`device_operations`) read `argument`, `matrix` and `table` too.
    """

    argument: Argument
    """Argument for a level and images of a size. It draws random numbers where the operation does."""
    apply: Callable[[Image.Image, Any, Fill], Image.Image]
    """Function that changes an image by an argument."""
    matrix: Callable[[Any, Size], Sequence[float]] | None = None
    """Affine matrix by argument, from pixels of the result to those of the image: a, b, c, d, e, f of
    (a x + b y + c, d x + e y + f). None if the operation is not affine."""
    table: Callable[[Any], Sequence[int]] | None = None
    """Table from old to new grey levels by argument; None if the operation is not such a table."""

    def __call__(self, image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
        """Return the image, changed."""
        return self.apply(image, self.argument(level, setting, image.size), setting.fill)


def _affine(argument: Argument, matrix: Callable[[Any, Size], Sequence[float]]) -> Operation:
    def apply(image: Image.Image, value: Any, fill: Fill) -> Image.Image:
        bilinear, affine = Image.Resampling.BILINEAR, Image.Transform.AFFINE
        return image.transform(image.size, affine, matrix(value, image.size), bilinear, fillcolor=fill)

    return Operation(argument, apply, matrix=matrix)


def _moved(place: int, most: float, unit: Callable[[Size], int] = lambda size: 1) -> Operation:
    """Return the shear or translation with up to ±`most` units at index `place` of its affine matrix.

    unit: function from an image's size to the size of a unit.
    """

    def matrix(value: Any, size: Size) -> list[float]:
        numbers = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        numbers[place] = value
        return numbers

    return _affine(lambda level, setting, size: setting.signed(level / HIGHEST * most) * unit(size), matrix)


def _rotation(degrees: Any, size: Size) -> list[float]:
    """Return the matrix of a rotation around the middle, with Pillow's rounding."""
    angle, (x, y) = -math.radians(degrees % 360.0), (size[0] / 2, size[1] / 2)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    down = round(-math.sin(angle), 15)
    return [cos, sin, cos * -x + sin * -y + 0.0 + x, down, cos, down * -x + cos * -y + 0.0 + y]


def _table_of(argument: Argument, table: Callable[[Any], Sequence[int]]) -> Operation:
    return Operation(argument, lambda image, value, _: image.point([*table(value)] * 3), table=table)


def _kept(bits: Any) -> list[int]:
    """Return the table that keeps the upper bits of each grey level."""
    return [value & (0xFF << (8 - bits) & 0xFF) for value in range(256)]


def _solarized(threshold: Any) -> list[int]:
    return [value if value < threshold else 255 - value for value in range(256)]


def _added(number: Any) -> list[int]:
    return [min(255, value + number) if value < 128 else value for value in range(256)]


def _bits(level: Any, setting: OperationContext, _: Size) -> Any:
    """Return 0 to 4 bits, as RandAugment's reference code does; with `increasing`, 4 down to 0."""
    bits = setting.truncated(level / HIGHEST * 4)
    return 4 - bits if setting.increasing else bits


def _original_bits(level: Any, setting: OperationContext, _: Size) -> Any:
    """Return 4 to 8 bits, as timm's AutoAugment does; with `increasing`, 8 to 4, as torchvision's."""
    part = level / HIGHEST * 4
    return 8 - setting.rounded(part) if setting.increasing else 4 + setting.truncated(part)


def _threshold(level: Any, setting: OperationContext, _: Size) -> Any:
    threshold = setting.truncated(level / HIGHEST * 256)
    return 256 - threshold if setting.increasing else threshold


def _factor(level: Any, setting: OperationContext, _: Size) -> Any:
    part = level / HIGHEST
    return setting.clipped(1 + setting.signed(0.9 * part), 0.1, math.inf) if setting.increasing else 0.1 + 1.8 * part


def _enhanced(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    return Operation(_factor, lambda image, factor, _: enhancer(image).enhance(factor))


def _plain(change: Callable[[Image.Image], Image.Image]) -> Operation:
    """Return an operation without an argument."""
    return Operation(lambda level, setting, size: 0, lambda image, _, fill: change(image))


LARGEST_BLUR = 2.0
"""Largest standard deviation of the blur, in pixels."""
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": _plain(ImageOps.autocontrast),
    "Equalize": _plain(ImageOps.equalize),
    "Invert": _table_of(lambda level, setting, size: 0, _solarized),
    "Rotate": _affine(lambda level, setting, size: setting.signed(level / HIGHEST * _DEGREES), _rotation),
    "Posterize": _table_of(_bits, _kept),
    "PosterizeOriginal": _table_of(_original_bits, _kept),
    "Solarize": _table_of(_threshold, _solarized),
    "SolarizeAdd": _table_of(lambda level, setting, size: setting.truncated(level / HIGHEST * 110), _added),
    "Color": _enhanced(ImageEnhance.Color),
    "Contrast": _enhanced(ImageEnhance.Contrast),
    "Brightness": _enhanced(ImageEnhance.Brightness),
    "Sharpness": _enhanced(ImageEnhance.Sharpness),
    "ShearX": _moved(1, _SHEAR),
    "ShearY": _moved(3, _SHEAR),
    "TranslateX": _moved(2, _TRANSLATION, lambda size: size[0]),
    "TranslateY": _moved(5, _TRANSLATION, lambda size: size[1]),
    "Grayscale": _plain(lambda image: image.convert("L").convert("RGB")),
    "GaussianBlur": Operation(
        lambda level, setting, size: setting.draws.uniform(0.1, LARGEST_BLUR),
        lambda image, sigma, _: image.filter(ImageFilter.GaussianBlur(sigma)),
    ),
}

_RANDOM = tuple(name for name in OPERATIONS if name not in ("PosterizeOriginal", "Grayscale", "GaussianBlur"))
_UNIFORM = 100.0  # a larger deviation selects uniform levels, as in timm
_NO_FILL = (0, 0, 0)  # arguments do not depend on it


class Policy(Protocol):
    """Augmentation policy."""

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        """Return the image, augmented with random numbers from a stream."""

    def steps(self, draws: BatchDraws, size: Size) -> Iterator[Step]:
        """Yield what `__call__` does, for many images of one size: the same operations and arguments, in order."""


@dataclass(frozen=True)
class RandAugment:
    """RandAugment: random operations, drawn with replacement, each at a random level."""

    magnitude: float = 10.0
    """Mean level of operations, 0 to HIGHEST."""
    operations: int = 2
    """Number of operations drawn per image."""
    deviation: float = 0.0
    """Standard deviation of levels; above 100, levels are uniform between 0 and `magnitude`."""
    probability: float = 0.5
    """Probability that a drawn operation is applied."""
    increasing: bool = False
    """Whether a higher level is always a stronger change."""

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        setting = OperationContext(draws, fill, self.increasing)
        for _ in range(self.operations):
            name = _RANDOM[draws.below(len(_RANDOM))]
            if draws.uniform() < self.probability:
                image = OPERATIONS[name](image, self._level(setting), setting)
        return image

    def steps(self, draws: BatchDraws, size: Size) -> Iterator[Step]:
        names = np.array(_RANDOM)
        for _ in range(self.operations):
            chosen = names[draws.below(len(names))]
            rows = np.flatnonzero(draws.uniform() < self.probability)
            level = self._level(BatchContext(draws.of(rows), _NO_FILL))
            yield _by_name(draws, rows, chosen[rows], np.broadcast_to(level, len(rows)), size, self.increasing)

    def _level(self, setting: OperationContext) -> Any:
        level: Any = self.magnitude
        if self.deviation > _UNIFORM:
            level = setting.draws.uniform(0, self.magnitude)
        elif self.deviation:
            level += self.deviation * setting.draws.normal()
        return setting.clipped(level, 0.0, float(HIGHEST))


@dataclass(frozen=True)
class OneOf:
    """Policy that applies one of several sub-policies, drawn with equal probability."""

    lines: tuple[tuple[tuple[str, float, float], ...], ...]
    """Sub-policies: the operations of each, as (name, probability, level)."""
    increasing: bool = False
    """Whether a higher level is always a stronger change."""

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        setting = OperationContext(draws, fill, self.increasing)
        for name, probability, level in self.lines[draws.below(len(self.lines))]:
            if draws.uniform() < probability:
                image = OPERATIONS[name](image, level, setting)
        return image

    def steps(self, draws: BatchDraws, size: Size) -> Iterator[Step]:
        drawn = draws.below(len(self.lines))
        for place in range(max(map(len, self.lines))):
            # A line that has ended draws nothing more.
            lines = [line[place] if place < len(line) else None for line in self.lines]
            rows = np.flatnonzero(np.array([line is not None for line in lines])[drawn])
            names, probabilities, levels = (
                np.array([line[part] if line else none for line in lines])[drawn]
                for part, none in ((0, ""), (1, 0.0), (2, 0.0))
            )
            rows = rows[draws.of(rows).uniform() < probabilities[rows]]
            yield _by_name(draws, rows, names[rows], levels[rows], size, self.increasing)


def _by_name(
    draws: BatchDraws,
    rows: NDArray[np.int64],
    names: NDArray[np.str_],
    levels: NDArray[np.float64],
    size: Size,
    increasing: bool,
) -> Step:
    """Return the step in which the operation of each name changes its rows, at the levels given for them."""
    step: Step = {}
    for name in np.unique(names).tolist():
        here = names == name
        chosen = rows[here]
        argument = OPERATIONS[name].argument(levels[here], BatchContext(draws.of(chosen), _NO_FILL, increasing), size)
        step[name] = chosen, np.broadcast_to(argument, len(chosen))
    return step


def _table(text: str, highest: int = HIGHEST, increasing: bool = False) -> OneOf:
    """Return the policy of a table whose magnitudes are from 0 to `highest`."""
    words = [line.split() for line in text.strip().splitlines()]
    lines = [[(w[i], float(w[i + 1]), float(w[i + 2]) * HIGHEST / highest) for i in range(0, len(w), 3)] for w in words]
    return OneOf(tuple(map(tuple, lines)), increasing)


_NAMED: dict[str, Policy] = {
    "original": _table(policy_tables.ORIGINAL),
    "cifar10": _table(policy_tables.CIFAR10, 9, increasing=True),
    "svhn": _table(policy_tables.SVHN, 9, increasing=True),
    "3a": _table("Grayscale 1 0\nSolarize 1 5\nGaussianBlur 1 0"),
}
_PARTS = {"m": "magnitude", "n": "operations", "mstd": "deviation", "p": "probability", "inc": "increasing"}


def parse_policy(text: str) -> Policy:
    """Return the policy that `text` names.

    Raises RecipeError for an unknown name.
    """
    if text in _NAMED:
        return _NAMED[text]
    kind, *parts = text.split("-")
    values: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]{1,4})([0-9]{1,9}(?:\.[0-9]{1,9})?)", part)
        if match is None or match[1] not in _PARTS or _PARTS[match[1]] in values:
            raise _unknown(text, f"it has '{shown(part)}'")
        values[_PARTS[match[1]]] = float(match[2])
    if kind != "rand":
        raise _unknown(text, f"there is no '{shown(kind)}'")
    if values.get("magnitude", 0) > HIGHEST:
        raise _unknown(text, f"m is above {HIGHEST}")
    if values.get("probability", 0) > 1:
        raise _unknown(text, "p is above 1")
    if not values.get("operations", 2.0).is_integer() or values.get("increasing", 0.0) not in (0.0, 1.0):
        raise _unknown(text, "n takes a whole number and inc 0 or 1")
    if values.get("operations", 0) > MAX_POLICY_OPERATIONS:
        raise _unknown(text, f"n is above {MAX_POLICY_OPERATIONS}")
    operations, increasing = int(values.pop("operations", 2)), bool(values.pop("increasing", 0))
    return RandAugment(operations=operations, increasing=increasing, **values)


def _unknown(text: str, why: str) -> RecipeError:
    return RecipeError(
        f"unknown augmentation '{shown(text)}': {why}; use original (ImageNet), cifar10, svhn, 3a, or rand with some "
        f"of -m9 (level, 0 to {HIGHEST}), -n2 (operations), -mstd0.5 (spread of levels), -p1 (probability of each) and "
        "-inc1 (levels that increase)"
    )
