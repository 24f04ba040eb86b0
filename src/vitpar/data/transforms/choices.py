"""Random choices of `TrainTransform` for many images at once. Those of an image depend on its key alone.

Sources: Szegedy et al. 2015 and torchvision's RandomResizedCrop; with `padding` torchvision's RandomCrop with
`pad_if_needed`; Zhong et al. 2020 for random erasing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import Draws
from vitpar.data.transforms.policies import Step
from vitpar.data.transforms.settings import TrainSettings

Numbers = NDArray[np.int64]
_ERASED_SHARE = 0.02, 1 / 3  # range of the erased fraction of the image's area
_ERASED_RATIO = 0.3  # height over width of the erased box, from this to its inverse
_TRIES = 10  # random boxes that are tried for a crop or an erased part


@dataclass(frozen=True)
class Erased:
    """Boxes of a batch that noise replaces, each array of one number a box."""

    rows: Numbers
    """Row of the batch."""
    top: Numbers
    """First row of pixels."""
    left: Numbers
    """First column of pixels."""
    height: Numbers
    """Height in pixels."""
    width: Numbers
    """Width in pixels."""
    seeds: Numbers
    """Number that the noise begins with (`Draws.seeds`)."""


@dataclass(frozen=True)
class Crops:
    """Parts of n images that become the input of a model."""

    top: Numbers
    """First row of each crop, int64 [n]; negative above the image."""
    left: Numbers
    """First column of each crop, int64 [n]; negative left of the image."""
    height: Numbers
    """Height of each crop before it is resized, int64 [n]."""
    width: Numbers
    """Width of each crop before it is resized, int64 [n]."""
    flips: NDArray[np.bool_]
    """Whether each image is flipped, bool [n]."""


@dataclass(frozen=True)
class Changes:
    """Changes of images after their crop."""

    steps: list[Step]
    """Operations of the policy and of the colour jitter, in order."""
    erased: Erased
    """Boxes that noise replaces."""


def draw_crops(settings: TrainSettings, draws: Draws, heights: Numbers, widths: Numbers) -> Crops:
    """Draw the crops of images by their heights and widths in pixels, int64 [n]."""
    crop = _resized_crops if settings.padding is None else _padded_crops
    return Crops(*crop(settings, draws, heights, widths), draws.uniform() < settings.flip)


def draw_changes(settings: TrainSettings, draws: Draws) -> Changes:
    """Draw what follows a crop, from the same streams."""
    steps = [*settings.policy.steps(draws, settings.size)] if settings.policy else []
    return Changes([*steps, *_jitter(settings, draws)], _erased(settings, draws))


def _padded_crops(settings: TrainSettings, draws: Draws, *sides: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    starts = []
    for side in sides:
        border = settings.border(side)
        starts.append(draws.below(side + 2 * border - settings.size + 1) - border)
    whole = np.full(len(draws), settings.size)
    return starts[0], starts[1], whole, whole


def _resized_crops(
    settings: TrainSettings, draws: Draws, heights: Numbers, widths: Numbers
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    """Draw the first of _TRIES boxes that fits; else the largest central box within the range of the ratio."""
    found = np.stack(settings.central_crop(heights, widths))

    def fits(rows: Numbers, h: Numbers, w: Numbers) -> NDArray[np.bool_]:
        return (h > 0) & (h <= heights[rows]) & (w > 0) & (w <= widths[rows])

    ratios = math.log(settings.ratio[0]), math.log(settings.ratio[1])
    for rows, h, w in _boxes(draws, np.arange(len(draws)), heights * widths, settings.scale, ratios, fits):
        those = draws.of(rows)
        found[:, rows] = those.below(heights[rows] - h + 1), those.below(widths[rows] - w + 1), h, w
    top, left, h, w = found
    return top, left, h, w


def _boxes(
    draws: Draws,
    rows: Numbers,
    areas: Numbers,
    share: tuple[float, float],
    log_ratio: tuple[float, float],
    fits: Callable[[Numbers, Numbers, Numbers], NDArray[np.bool_]],
) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yield rows with the heights and widths of boxes that fit, tried `_TRIES` times for each of `rows`.

    areas: of all images, of which a box has a random `share`.
    log_ratio: range of the logarithm of a box's width over height.
    """
    for _ in range(_TRIES):
        those = draws.of(rows)
        area = areas[rows] * those.uniform(*share)
        # Python's exponential: numpy's may differ in the last digit from one machine to another.
        ratio = np.array([math.exp(x) for x in those.uniform(*log_ratio).tolist()])
        h, w = np.rint(np.sqrt(area / ratio)).astype(np.int64), np.rint(np.sqrt(area * ratio)).astype(np.int64)
        good = fits(rows, h, w)
        yield rows[good], h[good], w[good]
        rows = rows[~good]
        if not len(rows):
            return


def _jitter(settings: TrainSettings, draws: Draws) -> Iterator[Step]:
    """Yield the changes of brightness, contrast and saturation, whose order differs from image to image."""
    kinds = [
        (name, amount)
        for name, amount in zip(("Brightness", "Contrast", "Color"), settings.color_jitter, strict=True)
        if amount
    ]
    everyone = np.arange(len(draws))
    rest = np.tile(np.arange(len(kinds)), (len(draws), 1))
    while rest.shape[1]:
        place = draws.below(rest.shape[1])
        chosen = rest[everyone, place]
        rest = rest[np.arange(rest.shape[1]) != place[:, None]].reshape(len(draws), -1)
        step: dict[str, tuple[Numbers, Any]] = {}
        for number, (name, amount) in enumerate(kinds):
            rows = np.flatnonzero(chosen == number)
            if len(rows):
                step[name] = rows, draws.of(rows).uniform(max(0.0, 1 - amount), 1 + amount)
        yield step


def _erased(settings: TrainSettings, draws: Draws) -> Erased:
    size = settings.size
    rows = np.flatnonzero(draws.uniform() < settings.erase)

    def fits(_: Numbers, h: Numbers, w: Numbers) -> NDArray[np.bool_]:
        return (h > 0) & (h < size) & (w > 0) & (w < size)

    # This ratio is height over width, unlike that of crops.
    log_ratio = math.log(_ERASED_RATIO), -math.log(_ERASED_RATIO)
    parts = [np.empty((6, 0), np.int64)]
    areas = np.full(len(draws), size**2)
    for here, w, h in _boxes(draws, rows, areas, _ERASED_SHARE, log_ratio, fits) if len(rows) else ():
        those = draws.of(here)
        parts.append(np.stack([here, those.below(size - h + 1), those.below(size - w + 1), h, w, those.seeds()]))
    return Erased(*np.concatenate(parts, 1))
