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
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import Draws
from vitpar.errors import RecipeError
from vitpar.text import shown

Step = dict[str, tuple[NDArray[np.int64], NDArray[Any]]]
"""Operations of one step of a batch by name: the rows that each changes, and the argument for each of them."""

HIGHEST = 10
"""Highest level of an operation."""
_MAX_OPERATIONS = 64
# Largest rotation in degrees, shear, and translation as a fraction of the image's size.
_DEGREES, _SHEAR, _TRANSLATION = 30.0, 0.3, 0.45


Argument = Callable[[Any, Draws, bool, int], Any]
"""Function from levels from 0 to HIGHEST, one for each image or one for all, to the arguments of an operation. It also
takes random numbers of the images, whether a higher level is always a stronger change, and the side of the images."""


@dataclass(frozen=True)
class Operation:
    """Operation on images at a level. What it does to pixels is in `operations`, unless it is one of two kinds."""

    argument: Argument
    """Arguments of levels."""
    matrix: Callable[[Any, int], Sequence[float]] | None = None
    """Affine matrix by argument and side of the image, from pixels of the result to those of the image: a, b, c, d, e,
    f of (a x + b y + c, d x + e y + f). None if the operation is not affine."""
    table: Callable[[Any], NDArray[np.int64]] | None = None
    """Tables from old to new grey levels by arguments, [..., 256]; None if the operation is not such a table."""


def _moved(place: int, most: float, of_side: bool = False) -> Operation:
    """Return the shear or translation with up to ±`most` at index `place` of its affine matrix.

    of_side: whether it is a fraction of the image's side.
    """

    def matrix(value: Any, side: int) -> list[float]:
        numbers = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        numbers[place] = value
        return numbers

    def argument(level: Any, draws: Draws, _: bool, side: int) -> Any:
        return _signed(draws, level / HIGHEST * most) * (side if of_side else 1)

    return Operation(argument, matrix)


def _signed(draws: Draws, value: Any) -> Any:
    """Return each value or its negative, with equal probability."""
    return np.where(draws.uniform() < 0.5, value, -value)


def _rotation(degrees: Any, side: int) -> list[float]:
    """Return the matrix of a rotation around the middle, with Pillow's rounding."""
    angle, x, y = -math.radians(degrees % 360.0), side / 2, side / 2
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    down = round(-math.sin(angle), 15)
    return [cos, sin, cos * -x + sin * -y + 0.0 + x, down, cos, down * -x + cos * -y + 0.0 + y]


_LEVELS = np.arange(256)


def _kept(bits: Any) -> NDArray[np.int64]:
    """Return the tables that keep the upper bits of each grey level."""
    return _LEVELS & (0xFF << (8 - np.asarray(bits)[..., None]))


def _solarized(threshold: Any) -> NDArray[np.int64]:
    return np.where(np.asarray(threshold)[..., None] > _LEVELS, _LEVELS, 255 - _LEVELS)


def _added(number: Any) -> NDArray[np.int64]:
    return np.where(_LEVELS < 128, np.minimum(255, _LEVELS + np.asarray(number)[..., None]), _LEVELS)


def _whole(value: Any) -> Any:
    """Return the integer part of numbers that are not negative."""
    return np.asarray(value).astype(np.int64)


def _bits(level: Any, _: Draws, increasing: bool, __: int) -> Any:
    """Return 0 to 4 bits, as RandAugment's reference code does; with `increasing`, 4 down to 0."""
    bits = _whole(level / HIGHEST * 4)
    return 4 - bits if increasing else bits


def _original_bits(level: Any, _: Draws, increasing: bool, __: int) -> Any:
    """Return 4 to 8 bits, as timm's AutoAugment does; with `increasing`, 8 to 4, as torchvision's."""
    part = level / HIGHEST * 4
    return 8 - np.rint(part).astype(np.int64) if increasing else 4 + _whole(part)


def _threshold(level: Any, _: Draws, increasing: bool, __: int) -> Any:
    threshold = _whole(level / HIGHEST * 256)
    return 256 - threshold if increasing else threshold


def _factor(level: Any, draws: Draws, increasing: bool, _: int) -> Any:
    part = level / HIGHEST
    return np.maximum(1 + _signed(draws, 0.9 * part), 0.1) if increasing else 0.1 + 1.8 * part


def _nothing(*_: Any) -> int:
    """Stand for the argument of an operation without one."""
    return 0


LARGEST_BLUR = 2.0
"""Largest standard deviation of the blur, in pixels."""
OPERATIONS: dict[str, Operation] = {
    "AutoContrast": Operation(_nothing),
    "Equalize": Operation(_nothing),
    "Invert": Operation(_nothing, table=_solarized),
    "Rotate": Operation(lambda level, draws, *_: _signed(draws, level / HIGHEST * _DEGREES), _rotation),
    "Posterize": Operation(_bits, table=_kept),
    "PosterizeOriginal": Operation(_original_bits, table=_kept),
    "Solarize": Operation(_threshold, table=_solarized),
    "SolarizeAdd": Operation(lambda level, *_: _whole(level / HIGHEST * 110), table=_added),
    "Color": Operation(_factor),
    "Contrast": Operation(_factor),
    "Brightness": Operation(_factor),
    "Sharpness": Operation(_factor),
    "ShearX": _moved(1, _SHEAR),
    "ShearY": _moved(3, _SHEAR),
    "TranslateX": _moved(2, _TRANSLATION, of_side=True),
    "TranslateY": _moved(5, _TRANSLATION, of_side=True),
    "Grayscale": Operation(_nothing),
    "GaussianBlur": Operation(lambda _, draws, *__: draws.uniform(0.1, LARGEST_BLUR)),
}

_RANDOM = tuple(name for name in OPERATIONS if name not in ("PosterizeOriginal", "Grayscale", "GaussianBlur"))
_UNIFORM = 100.0  # a larger deviation selects uniform levels, as in timm


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

    def steps(self, draws: Draws, side: int) -> Iterator[Step]:
        """Yield the operations on images of `side` pixels, with their arguments, in order."""
        names = np.array(_RANDOM)
        for _ in range(self.operations):
            chosen = names[draws.below(len(names))]
            rows = np.flatnonzero(draws.uniform() < self.probability)
            yield _by_name(draws, rows, chosen[rows], self._levels(draws.of(rows)), side, self.increasing)

    def _levels(self, draws: Draws) -> NDArray[np.float64]:
        levels = np.full(len(draws), float(self.magnitude))
        if self.deviation > _UNIFORM:
            levels = draws.uniform(0, self.magnitude)
        elif self.deviation:
            levels += self.deviation * draws.normal()
        return levels.clip(0, HIGHEST)


@dataclass(frozen=True)
class OneOf:
    """Policy that applies one of several sub-policies, drawn with equal probability."""

    lines: tuple[tuple[tuple[str, float, float], ...], ...]
    """Sub-policies: the operations of each, as (name, probability, level)."""
    increasing: bool = False
    """Whether a higher level is always a stronger change."""

    def steps(self, draws: Draws, side: int) -> Iterator[Step]:
        """Yield the operations on images of `side` pixels, with their arguments, in order."""
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
            yield _by_name(draws, rows, names[rows], levels[rows], side, self.increasing)


@dataclass(frozen=True)
class Distortions:
    """Colours, grey, blur and solarising of the crops of self-distillation, as in DINOv2 (arXiv 2304.07193)."""

    blur: float = 0.5
    """Probability of a blur of 0.1 to 2 pixels."""
    solarize: float = 0.0
    """Probability that levels from 128 on are inverted."""
    jitter: float = 0.8
    """Probability that brightness, contrast, saturation and hue change, in any order."""
    grey: float = 0.2
    """Probability that the image becomes grey."""

    def steps(self, draws: Draws, side: int) -> Iterator[Step]:
        """Yield the operations on images with their arguments, in order."""
        changed = np.flatnonzero(draws.uniform() < self.jitter)
        own = draws.of(changed)
        amounts = {"Brightness": (0.6, 1.4), "Contrast": (0.6, 1.4), "Color": (0.8, 1.2), "Hue": (-0.1, 0.1)}
        order = np.argsort(np.stack([own.uniform() for _ in amounts]), axis=0, kind="stable")
        for place in order:
            step: Step = {}
            for number, (name, (low, high)) in enumerate(amounts.items()):
                rows = np.flatnonzero(place == number)
                if len(rows):
                    step[name] = changed[rows], own.of(rows).uniform(low, high)
            yield step
        yield {"Grayscale": _where(draws, self.grey, 0)}
        blurred = np.flatnonzero(draws.uniform() < self.blur)
        yield {"GaussianBlur": (blurred, draws.of(blurred).uniform(0.1, LARGEST_BLUR))}
        yield {"Solarize": _where(draws, self.solarize, 128)}


def _where(draws: Draws, probability: float, argument: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return rows drawn with a probability, and the same argument for each."""
    rows = np.flatnonzero(draws.uniform() < probability)
    return rows, np.full(len(rows), argument)


def _by_name(
    draws: Draws,
    rows: NDArray[np.int64],
    names: NDArray[np.str_],
    levels: NDArray[np.float64],
    side: int,
    increasing: bool,
) -> Step:
    """Return the step in which the operation of each name changes its rows, at the levels given for them."""
    step: Step = {}
    for name in np.unique(names).tolist():
        here = names == name
        chosen = rows[here]
        argument = OPERATIONS[name].argument(levels[here], draws.of(chosen), increasing, side)
        step[name] = chosen, np.broadcast_to(argument, len(chosen))
    return step


Policy = RandAugment | OneOf | Distortions


def _named() -> dict[str, Policy]:
    """Return the policies of `auto_augment.txt`, and 3-Augment."""
    table = resources.files("vitpar.data.transforms").joinpath("auto_augment.txt").read_text()
    three = [("Grayscale", 1.0, 0.0), ("Solarize", 1.0, 5.0), ("GaussianBlur", 1.0, 0.0)]
    policies: dict[str, Policy] = {"3a": OneOf(tuple((operation,) for operation in three))}
    for name, words in re.findall(r"^\[(\w+)\]\n([^\[]*)", table, re.MULTILINE):
        highest = HIGHEST if name == "original" else 9
        operations = [
            (operation, float(probability), float(level) * HIGHEST / highest)
            for operation, probability, level in zip(*[iter(words.split())] * 3, strict=True)
        ]
        lines = tuple(zip(operations[::2], operations[1::2], strict=True))
        policies[name] = OneOf(lines, increasing=name != "original")
    return policies


_NAMED = _named()
_PARTS = {"m": "magnitude", "n": "operations", "mstd": "deviation", "p": "probability", "inc": "increasing"}


def parse_policy(text: str) -> Policy:
    """Return the policy that `text` names. Raises RecipeError for an unknown name."""
    if text in _NAMED:
        return _NAMED[text]
    kind, *parts = text.split("-")
    found = [re.fullmatch(r"(mstd|inc|m|n|p)([0-9]{1,9}(?:\.[0-9]{1,9})?)", part) for part in parts]
    values = {_PARTS[match[1]]: float(match[2]) for match in found if match}
    operations, increasing = values.pop("operations", 2.0), values.pop("increasing", 0.0)
    usable = operations.is_integer() and operations <= _MAX_OPERATIONS and increasing in (0, 1)
    usable &= values.get("magnitude", 0) <= HIGHEST and values.get("probability", 0) <= 1
    given = {match[1] for match in found if match}
    if kind != "rand" or not usable or len(given) < len(parts):
        raise RecipeError(
            f"unknown augmentation '{shown(text)}': use original (ImageNet), cifar10, svhn, 3a, or rand with some of "
            f"-m9 (level, 0 to {HIGHEST}), -n2 (operations, up to {_MAX_OPERATIONS}), -mstd0.5 (spread of levels), -p1 "
            "(probability of each) and -inc1 (levels that increase), each once"
        )
    return RandAugment(operations=int(operations), increasing=bool(increasing), **values)
