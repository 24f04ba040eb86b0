"""Random choices of `TrainTransform` for many images at once. Those of an image depend on its key alone.

Sources: Szegedy et al. 2015 and torchvision's RandomResizedCrop; with `padding` torchvision's RandomCrop with
`pad_if_needed`; Zhong et al. 2020 for random erasing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import Draws
from vitpar.data.transforms.operations import arguments
from vitpar.data.transforms.policies import Step

if TYPE_CHECKING:
    from vitpar.data.transforms.sample import TrainTransform

Numbers = NDArray[np.int64]
Work = list[tuple[str, tuple[NDArray[Any], ...]]]
"""Parts of the work for a batch, in order: the name of a change and its arrays, of which the first numbers images."""
_ERASED_SHARE = 0.02, 1 / 3  # range of the erased fraction of the image's area
_ERASED_RATIO = 0.3  # height over width of the erased box, from this to its inverse
_TRIES = 10  # random boxes that are tried for a crop or an erased part


def draw_crops(transform: TrainTransform, draws: Draws, heights: Numbers, widths: Numbers) -> Numbers:
    """Draw the crops of images by their heights and widths in pixels, int64 [n].

    Returns top, left, height and width of each crop, and 1 if it is flipped, else 0: int64 [5, n]. The crop begins
    outside of the image if top or left is negative.
    """
    crop = _resized_crops if transform.padding is None else _padded_crops
    return np.stack([*crop(transform, draws, heights, widths), draws.uniform() < transform.flip])


def _padded_crops(transform: TrainTransform, draws: Draws, *sides: Numbers) -> list[Numbers]:
    assert transform.padding is not None, "crops are padded"
    starts = []
    for side in sides:
        # A side that is too short with `padding` gets what it lacks once more on both ends, as in torchvision.
        border = transform.padding + np.maximum(0, transform.size - side - 2 * transform.padding)
        starts.append(draws.below(side + 2 * border - transform.size + 1) - border)
    return [*starts, *np.full((2, len(draws)), transform.size)]


def _resized_crops(transform: TrainTransform, draws: Draws, heights: Numbers, widths: Numbers) -> Numbers:
    """Draw the first of _TRIES boxes that fits; else the largest central box within the range of the ratio."""
    narrow, wide = transform.ratio
    h = np.minimum(heights, np.maximum(1, np.rint(widths / narrow).astype(np.int64)))
    w = np.minimum(widths, np.maximum(1, np.rint(heights * wide).astype(np.int64)))
    found = np.stack([(heights - h) // 2, (widths - w) // 2, h, w])

    def fits(rows: Numbers, h: Numbers, w: Numbers) -> NDArray[np.bool_]:
        return (h > 0) & (h <= heights[rows]) & (w > 0) & (w <= widths[rows])

    ratios = math.log(narrow), math.log(wide)
    for rows, h, w in _boxes(draws, np.arange(len(draws)), heights * widths, transform.scale, ratios, fits):
        own = draws.of(rows)
        found[:, rows] = own.below(heights[rows] - h + 1), own.below(widths[rows] - w + 1), h, w
    return found


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
        if not len(rows):
            return
        own = draws.of(rows)
        area = areas[rows] * own.uniform(*share)
        # Python's exponential: numpy's may differ in the last digit from one machine to another.
        ratio = np.array([math.exp(x) for x in own.uniform(*log_ratio).tolist()])
        h, w = np.rint(np.sqrt(area / ratio)).astype(np.int64), np.rint(np.sqrt(area * ratio)).astype(np.int64)
        good = fits(rows, h, w)
        yield rows[good], h[good], w[good]
        rows = rows[~good]


def draw_changes(transform: TrainTransform, draws: Draws) -> Work:
    """Draw what follows a crop, from the same streams: the policy, the jitter of colours, and random erasing."""
    work: Work = []
    policy = transform.policy.steps(draws, transform.size) if transform.policy else ()
    for step in chain(policy, _jitter(transform, draws)):
        groups: dict[str, list[tuple[Numbers, NDArray[Any]]]] = {}
        for name, (rows, values) in step.items():
            if len(rows):
                change, numbers = arguments(name, values, transform.size)
                groups.setdefault(change, []).append((rows, numbers))
        for change, parts in groups.items():
            work.append((change, tuple(map(np.concatenate, zip(*parts, strict=True)))))
    erased = _erased(transform, draws)
    return [*work, ("erase", tuple(erased))] if erased.size else work


def _jitter(transform: TrainTransform, draws: Draws) -> Iterator[Step]:
    """Yield the changes of brightness, contrast and saturation, whose order differs from image to image."""
    amounts = zip(("Brightness", "Contrast", "Color"), transform.color_jitter, strict=True)
    kinds = [(name, amount) for name, amount in amounts if amount]
    everyone = np.arange(len(draws))
    rest = np.tile(np.arange(len(kinds)), (len(draws), 1))
    while rest.shape[1]:
        place = draws.below(rest.shape[1])
        chosen = rest[everyone, place]
        rest = rest[np.arange(rest.shape[1]) != place[:, None]].reshape(len(draws), -1)
        step: Step = {}
        for number, (name, amount) in enumerate(kinds):
            rows = np.flatnonzero(chosen == number)
            if len(rows):
                step[name] = rows, draws.of(rows).uniform(max(0.0, 1 - amount), 1 + amount)
        yield step


def _erased(transform: TrainTransform, draws: Draws) -> Numbers:
    """Draw boxes that noise replaces: their rows, top, left, height, width, and seed of the noise, int64 [6, boxes]."""
    size = transform.size
    rows = np.flatnonzero(draws.uniform() < transform.erase)

    def fits(_: Numbers, h: Numbers, w: Numbers) -> NDArray[np.bool_]:
        return (h > 0) & (h < size) & (w > 0) & (w < size)

    # This ratio is height over width, unlike that of crops.
    log_ratio = math.log(_ERASED_RATIO), -math.log(_ERASED_RATIO)
    parts, areas = [np.empty((6, 0), np.int64)], np.full(len(draws), size**2)
    for here, w, h in _boxes(draws, rows, areas, _ERASED_SHARE, log_ratio, fits):
        own = draws.of(here)
        parts.append(np.stack([here, own.below(size - h + 1), own.below(size - w + 1), h, w, own.seeds()]))
    return np.concatenate(parts, 1)
