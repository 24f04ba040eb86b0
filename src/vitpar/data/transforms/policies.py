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

import re
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitpar.data.randomness import Draws
from vitpar.data.transforms import policy_tables
from vitpar.errors import RecipeError
from vitpar.limits import MAX_POLICY_OPERATIONS
from vitpar.text import shown

Fill = tuple[int, int, int]
"""RGB colour, 0 to 255, of pixels that an operation moves in from outside the image."""
Policy = Callable[[Image.Image, Draws, Fill], Image.Image]
"""Function that augments an image with random numbers from a stream."""

HIGHEST = 10
"""Highest level of an operation."""
# Largest rotation in degrees, shear, and translation as a fraction of the image's size.
_DEGREES, _SHEAR, _TRANSLATION = 30.0, 0.3, 0.45


@dataclass(frozen=True)
class OperationContext:
    """Arguments that all operations of a policy share."""

    draws: Draws
    """Random numbers of the sample."""
    fill: Fill
    """Colour of pixels from outside the image."""
    increasing: bool = False
    """Whether a higher level is always a stronger change."""

    def signed(self, value: float) -> float:
        """Return `value` or its negative, with equal probability."""
        return value if self.draws.uniform() < 0.5 else -value


Operation = Callable[[Image.Image, float, OperationContext], Image.Image]
"""Function that changes an image by a level from 0 to HIGHEST."""


def _rotate(image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
    angle = setting.signed(level / HIGHEST * _DEGREES)
    return image.rotate(angle, Image.Resampling.BILINEAR, fillcolor=setting.fill)


def _affine(place: int, most: float, unit: Callable[[Image.Image], int] = lambda image: 1) -> Operation:
    """Return the shear or translation with up to ±`most` units at index `place` of its affine matrix.

    unit: function from an image to the size of a unit.
    """

    def apply(image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
        matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
        matrix[place] = setting.signed(level / HIGHEST * most) * unit(image)
        bilinear = Image.Resampling.BILINEAR
        return image.transform(image.size, Image.Transform.AFFINE, matrix, bilinear, fillcolor=setting.fill)

    return apply


def _enhanced(enhancer: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    def apply(image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
        part = level / HIGHEST
        factor = max(0.1, 1 + setting.signed(0.9 * part)) if setting.increasing else 0.1 + 1.8 * part
        return enhancer(image).enhance(factor)

    return apply


def _posterize(image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
    """Keep 0 to 4 bits of each channel, as RandAugment's reference code does; with `increasing`, 4 down to 0."""
    bits = int(level / HIGHEST * 4)
    return _keep_bits(image, 4 - bits if setting.increasing else bits)


def _posterize_original(image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
    """Keep 4 to 8 bits of each channel, as timm's AutoAugment does; with `increasing`, 8 to 4, as torchvision's."""
    return _keep_bits(image, 8 - round(level / HIGHEST * 4) if setting.increasing else 4 + int(level / HIGHEST * 4))


def _keep_bits(image: Image.Image, bits: int) -> Image.Image:
    return ImageOps.posterize(image, bits) if bits else Image.new("RGB", image.size)


def _solarize(image: Image.Image, level: float, setting: OperationContext) -> Image.Image:
    threshold = int(level / HIGHEST * 256)
    return ImageOps.solarize(image, 256 - threshold if setting.increasing else threshold)


def _solarize_add(image: Image.Image, level: float, _: OperationContext) -> Image.Image:
    added = int(level / HIGHEST * 110)
    return image.point([min(255, value + added) if value < 128 else value for value in range(256)] * 3)


def _blur(image: Image.Image, _: float, setting: OperationContext) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(setting.draws.uniform(0.1, 2.0)))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, level, setting: ImageOps.autocontrast(image),
    "Equalize": lambda image, level, setting: ImageOps.equalize(image),
    "Invert": lambda image, level, setting: ImageOps.invert(image),
    "Rotate": _rotate,
    "Posterize": _posterize,
    "PosterizeOriginal": _posterize_original,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Color": _enhanced(ImageEnhance.Color),
    "Contrast": _enhanced(ImageEnhance.Contrast),
    "Brightness": _enhanced(ImageEnhance.Brightness),
    "Sharpness": _enhanced(ImageEnhance.Sharpness),
    "ShearX": _affine(1, _SHEAR),
    "ShearY": _affine(3, _SHEAR),
    "TranslateX": _affine(2, _TRANSLATION, lambda image: image.width),
    "TranslateY": _affine(5, _TRANSLATION, lambda image: image.height),
    "Grayscale": lambda image, level, setting: image.convert("L").convert("RGB"),
    "GaussianBlur": _blur,
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

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        setting = OperationContext(draws, fill, self.increasing)
        for _ in range(self.operations):
            name = _RANDOM[draws.below(len(_RANDOM))]
            if draws.uniform() < self.probability:
                image = OPERATIONS[name](image, self._level(draws), setting)
        return image

    def _level(self, draws: Draws) -> float:
        level = self.magnitude
        if self.deviation > _UNIFORM:
            level = draws.uniform(0, self.magnitude)
        elif self.deviation:
            level += self.deviation * draws.normal()
        return min(max(level, 0.0), float(HIGHEST))


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
