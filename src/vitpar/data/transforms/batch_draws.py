"""Random choices of `TrainTransform` for a batch of images of one size, made for all of them at once on the host.

They are exactly those that the transform makes for each image by its key. `device` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import BatchDraws
from vitpar.data.transforms.policies import Step
from vitpar.data.transforms.sample import ERASED_RATIO, ERASED_SHARE, TRIES
from vitpar.data.transforms.settings import TrainSettings

Numbers = NDArray[np.int64]


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
    """Number that the noise begins with (`BatchDraws.seeds`)."""


@dataclass(frozen=True)
class BatchChoices:
    """Random choices for a batch of n images."""

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
    steps: list[Step]
    """Operations of the policy and of the colour jitter, in order."""
    erased: Erased
    """Boxes that noise replaces."""


def draw_batch(settings: TrainSettings, keys: Numbers, height: int, width: int) -> BatchChoices:
    """Return the choices for the images of `keys`, int64 [n], all of `height` and `width` pixels."""
    draws = BatchDraws(keys)
    crop = (_resized_crops if settings.padding is None else _padded_crops)(settings, draws, len(keys), height, width)
    flips = draws.uniform() < settings.flip
    size = settings.size, settings.size
    steps = [*settings.policy.steps(draws, size)] if settings.policy else []
    steps += _jitter(settings, draws, len(keys))
    return BatchChoices(*crop, flips, steps, _erased(settings, draws, len(keys)))


def _padded_crops(
    settings: TrainSettings, draws: BatchDraws, count: int, *sides: int
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    starts = []
    for side in sides:
        border = settings.border(side)
        starts.append(draws.below(side + 2 * border - settings.size + 1) - border)
    whole = np.full(count, settings.size)
    return starts[0], starts[1], whole, whole


def _resized_crops(
    settings: TrainSettings, draws: BatchDraws, count: int, height: int, width: int
) -> tuple[Numbers, Numbers, Numbers, Numbers]:
    found = np.empty((4, count), np.int64)
    found[:] = np.array(settings.central_crop(height, width))[:, None]

    def fits(h: Numbers, w: Numbers) -> NDArray[np.bool_]:
        return (h > 0) & (h <= height) & (w > 0) & (w <= width)

    ratios = math.log(settings.ratio[0]), math.log(settings.ratio[1])
    for rows, h, w in _boxes(draws, np.arange(count), height * width, settings.scale, ratios, fits):
        those = draws.of(rows)
        found[:, rows] = those.below(height - h + 1), those.below(width - w + 1), h, w
    top, left, h, w = found
    return top, left, h, w


def _boxes(
    draws: BatchDraws,
    rows: Numbers,
    area: int,
    share: tuple[float, float],
    log_ratio: tuple[float, float],
    fits: Callable[[Numbers, Numbers], NDArray[np.bool_]],
) -> Iterator[tuple[Numbers, Numbers, Numbers]]:
    """Yield rows with the heights and widths of boxes that fit, tried `TRIES` times for each of `rows`.

    area: of the image, of which a box has a random `share`.
    log_ratio: range of the logarithm of a box's width over height.
    """
    for _ in range(TRIES):
        those = draws.of(rows)
        areas = area * those.uniform(*share)
        # numpy's exponential may differ from that of `TrainTransform` in the last digit.
        ratios = np.array([math.exp(x) for x in those.uniform(*log_ratio).tolist()])
        h, w = np.rint(np.sqrt(areas / ratios)).astype(np.int64), np.rint(np.sqrt(areas * ratios)).astype(np.int64)
        good = fits(h, w)
        yield rows[good], h[good], w[good]
        rows = rows[~good]
        if not len(rows):
            return


def _jitter(settings: TrainSettings, draws: BatchDraws, count: int) -> Iterator[Step]:
    """Yield the changes of brightness, contrast and saturation, whose order differs from image to image."""
    kinds = [
        (name, amount)
        for name, amount in zip(("Brightness", "Contrast", "Color"), settings.color_jitter, strict=True)
        if amount
    ]
    rest, everyone = np.tile(np.arange(len(kinds)), (count, 1)), np.arange(count)
    while rest.shape[1]:
        place = draws.below(rest.shape[1])
        chosen = rest[everyone, place]
        rest = rest[np.arange(rest.shape[1]) != place[:, None]].reshape(count, -1)
        step: dict[str, tuple[Numbers, Any]] = {}
        for number, (name, amount) in enumerate(kinds):
            rows = np.flatnonzero(chosen == number)
            if len(rows):
                step[name] = rows, draws.of(rows).uniform(max(0.0, 1 - amount), 1 + amount)
        yield step


def _erased(settings: TrainSettings, draws: BatchDraws, count: int) -> Erased:
    size = settings.size
    rows = np.flatnonzero(draws.uniform() < settings.erase)

    def fits(h: Numbers, w: Numbers) -> NDArray[np.bool_]:
        return (h > 0) & (h < size) & (w > 0) & (w < size)

    # This ratio is height over width, unlike that of crops.
    log_ratio = math.log(ERASED_RATIO), -math.log(ERASED_RATIO)
    parts = [np.empty((6, 0), np.int64)]
    for here, w, h in _boxes(draws, rows, size**2, ERASED_SHARE, log_ratio, fits) if len(rows) else ():
        those = draws.of(here)
        parts.append(np.stack([here, those.below(size - h + 1), those.below(size - w + 1), h, w, those.seeds()]))
    return Erased(*np.concatenate(parts, 1))
