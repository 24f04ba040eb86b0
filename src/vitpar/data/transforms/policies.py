"""Policies: which operations an image goes through. Named as timm names them.

`rand-m9-n2-mstd0.5-inc1`   RandAugment (Cubuk et al. 2020)
`original`                  AutoAugment's policy for ImageNet (Cubuk et al. 2019, table 9)
`3a`                        3-Augment (Touvron et al. 2022): grey, solarised or blurred
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from vitpar.data.randomness import Draws
from vitpar.data.transforms.operations import HIGHEST, OPERATIONS, Setting
from vitpar.errors import RecipeError, shown
from vitpar.limits import MAX_POLICY_OPERATIONS

Fill = tuple[int, int, int]
Policy = Callable[[Image.Image, Draws, Fill], Image.Image]

_RANDOM = tuple(name for name in OPERATIONS if name not in ("PosterizeOriginal", "Grayscale", "GaussianBlur"))
_UNIFORM = 100.0  # a larger deviation stands for uniform levels

# Two operations of (name, probability, level) a line.
_ORIGINAL = """
PosterizeOriginal 0.4 8     Rotate 0.6 9
Solarize 0.6 5              AutoContrast 0.6 5
Equalize 0.8 8              Equalize 0.6 3
PosterizeOriginal 0.6 7     PosterizeOriginal 0.6 6
Equalize 0.4 7              Solarize 0.2 4
Equalize 0.4 4              Rotate 0.8 8
Solarize 0.6 3              Equalize 0.6 7
PosterizeOriginal 0.8 5     Equalize 1.0 2
Rotate 0.2 3                Solarize 0.6 8
Equalize 0.6 8              PosterizeOriginal 0.4 6
Rotate 0.8 8                Color 0.4 0
Rotate 0.4 9                Equalize 0.6 2
Equalize 0.0 7              Equalize 0.8 8
Invert 0.6 4                Equalize 1.0 8
Color 0.6 4                 Contrast 1.0 8
Rotate 0.8 8                Color 1.0 2
Color 0.8 8                 Solarize 0.8 7
Sharpness 0.4 7             Invert 0.6 8
ShearX 0.6 5                Equalize 1.0 9
Color 0.4 0                 Equalize 0.6 3
Equalize 0.4 7              Solarize 0.2 4
Solarize 0.6 5              AutoContrast 0.6 5
Invert 0.6 4                Equalize 1.0 8
Color 0.6 4                 Contrast 1.0 8
Equalize 0.8 8              Equalize 0.6 3
"""


@dataclass(frozen=True)
class RandAugment:
    """`operations` of all, drawn with replacement, each applied with `probability` at a level around `magnitude` with
    standard deviation `deviation` (above 100: anywhere below `magnitude`)."""

    magnitude: float = 10.0
    operations: int = 2
    deviation: float = 0.0
    probability: float = 0.5
    increasing: bool = False

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        setting = Setting(draws, fill, self.increasing)
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
    """One line of operations, all lines as likely; each operation of it with its own probability, at its own level."""

    lines: tuple[tuple[tuple[str, float, float], ...], ...]
    increasing: bool = False

    def __call__(self, image: Image.Image, draws: Draws, fill: Fill) -> Image.Image:
        setting = Setting(draws, fill, self.increasing)
        for name, probability, level in self.lines[draws.below(len(self.lines))]:
            if draws.uniform() < probability:
                image = OPERATIONS[name](image, level, setting)
        return image


def _table(text: str) -> OneOf:
    lines = [line.split() for line in text.strip().splitlines()]
    return OneOf(tuple(tuple((w[i], float(w[i + 1]), float(w[i + 2])) for i in range(0, len(w), 3)) for w in lines))


_NAMED: dict[str, Policy] = {
    "original": _table(_ORIGINAL),
    "3a": _table("Grayscale 1 0\nSolarize 1 5\nGaussianBlur 1 0"),
}
_PARTS = {"m": "magnitude", "n": "operations", "mstd": "deviation", "p": "probability", "inc": "increasing"}


def parse_policy(text: str) -> Policy:
    """The policy that `text` names. Raises RecipeError for none."""
    if text in _NAMED:
        return _NAMED[text]
    kind, *parts = text.split("-")
    found: dict[str, float] = {}
    for part in parts:
        match = re.fullmatch(r"([a-z]{1,4})([0-9]{1,9}(?:\.[0-9]{1,9})?)", part)
        if match is None or match[1] not in _PARTS or _PARTS[match[1]] in found:
            raise _unknown(text, f"it has '{shown(part)}'")
        found[_PARTS[match[1]]] = float(match[2])
    if kind != "rand":
        raise _unknown(text, f"there is no '{shown(kind)}'")
    if found.get("magnitude", 0) > HIGHEST:
        raise _unknown(text, f"m is above {HIGHEST}")
    if found.get("probability", 0) > 1:
        raise _unknown(text, "p is above 1")
    if not found.get("operations", 2.0).is_integer() or found.get("increasing", 0.0) not in (0.0, 1.0):
        raise _unknown(text, "n takes a whole number and inc 0 or 1")
    if found.get("operations", 0) > MAX_POLICY_OPERATIONS:
        raise _unknown(text, f"n is above {MAX_POLICY_OPERATIONS}")
    operations, increasing = int(found.pop("operations", 2)), bool(found.pop("increasing", 0))
    return RandAugment(operations=operations, increasing=increasing, **found)


def _unknown(text: str, why: str) -> RecipeError:
    return RecipeError(
        f"unknown augmentation '{shown(text)}': {why}; use original, 3a, or rand with some of -m9 (level, 0 to "
        f"{HIGHEST}), "
        "-n2 (operations), -mstd0.5 (spread of levels), -p1 (probability of each) and -inc1 (levels that increase)"
    )
