"""Operations on many images at once, on any device, with Pillow's pixels, bit by bit.

The arithmetic is that of Pillow: integers, 32-bit floats for blends, and 64-bit floats for affine maps. Products and
sums are separate calls of torch, since a fused one would round once in place of twice. No call waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.transforms.policies import OPERATIONS
from vitpar.models.keyed_random import GOLDEN, mix

if TYPE_CHECKING:
    from vitpar.data.transforms.sample import TrainTransform

_BLUR_PASSES, _BLUR_ONE = 3, 1 << 24
_BLUR_REACH = 2  # pixels on each side that a pass reads, for the largest blur
_SMOOTH_CENTRE, _SMOOTH_SUM = 5, 13  # weights of Pillow's SMOOTH filter: 1 but in the centre
_WORD_BYTES = 8

Change = Callable[..., Tensor]
"""Function from a `TrainTransform`, images, uint8 [k, 3, side, side], and arrays of numbers to new images."""


def fill_colour(mean: Sequence[float]) -> tuple[int, ...]:
    """Return the grey level of each channel for pixels from outside of an image. mean: for pixels in 0..1."""
    return tuple(min(255, max(0, round(255 * channel))) for channel in mean)


def arguments(name: str, values: NDArray[Any], side: int) -> tuple[str, NDArray[Any]]:
    """Return the change in `CHANGES` that does operation `name` of a policy, and a row of numbers for each image.

    values: argument of the operation for each image, [k].
    side: of the images, in pixels.
    """
    if name not in OPERATIONS:  # a hue, which no policy of `parse_policy` changes
        return name, values.astype(np.float64)
    operation = OPERATIONS[name]
    if operation.matrix is not None:
        matrices = np.array([operation.matrix(value, side) for value in values.tolist()])
        if (matrices[:, 3:] == (0, 1, 0)).all():
            return "across", matrices[:, :3]
        return ("down", matrices[:, 3:]) if (matrices[:, :3] == (1, 0, 0)).all() else ("affine", matrices)
    if operation.table is not None:
        return "table", operation.table(values).astype(np.uint8)
    if name == "GaussianBlur":
        return name, np.stack([_taps(sigma) for sigma in values.tolist()])
    return name, values.astype(np.float64)


def _transformed(transform: TrainTransform, images: Tensor, matrices: Tensor) -> Tensor:
    """Transform images by matrices, float64 [k, 6], with bilinear interpolation."""
    count, channels, height, width = images.shape
    x, y = (torch.arange(side, device=images.device, dtype=torch.float64) + 0.5 for side in (width, height))
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    x, y = x[None, None, :], y[None, :, None]
    across, down = a * x + b * y + c, d * x + e * y + f
    inside = _within(across, width) & _within(down, height)
    across, down = across.sub_(0.5), down.sub_(0.5)
    left, top = across.floor(), down.floor()
    right_part, low_part = across.sub_(left)[:, None], down.sub_(top)[:, None]
    columns = [(left + step).clamp_(0, width - 1).int() for step in (0, 1)]
    rows = [(top + step).clamp_(0, height - 1).int().mul_(width) for step in (0, 1)]
    pixels = images.flatten(2)

    def at(row: Tensor, column: Tensor) -> Tensor:
        places = (row + column).long().view(count, 1, -1).expand(-1, channels, -1)
        return pixels.gather(2, places).view(count, channels, -1, width).double()

    upper, lower = (_between(at(row, columns[0]), at(row, columns[1]), right_part) for row in rows)
    return _filled(transform, _between(upper, lower, low_part), inside)


def _moved(transform: TrainTransform, images: Tensor, numbers: Tensor, dim: int) -> Tensor:
    """Shear or translate images along `dim`: with the pixels of `_transformed`, from half of its reads.

    numbers: those of the matrices for `dim`, float64 [k, 3].
    """
    side = images.shape[dim]
    x, y = (
        torch.arange(n, device=images.device, dtype=torch.float64) + 0.5 for n in (images.shape[3], images.shape[2])
    )
    a, b, c = numbers[:, :, None, None].unbind(1)
    places = a * x + b * y[:, None] + c
    inside = _within(places, side)
    places = places.sub_(0.5)
    first = places.floor()
    part = places.sub_(first)[:, None]
    one, other = (
        images.gather(dim, (first + step).clamp_(0, side - 1).long()[:, None].expand_as(images)).double()
        for step in (0, 1)
    )
    return _filled(transform, _between(one, other, part), inside)


def _between(one: Tensor, other: Tensor, part: Tensor) -> Tensor:
    return other.sub_(one).mul_(part).add_(one)


def _filled(transform: TrainTransform, pixels: Tensor, inside: Tensor) -> Tensor:
    """Return pixels, float64, as uint8, with the transform's colour where they are from outside the image."""
    kept = inside.to(torch.uint8)[:, None]
    return pixels.to(torch.uint8).mul_(kept).add_((1 - kept) * _levels(fill_colour(transform.mean), pixels.device))


def _within(places: Tensor, side: int) -> Tensor:
    """Return whether places are at least 0 and below `side`. One comparison takes half of the time of two."""
    return places.clamp(0, math.nextafter(side, 0)) == places


@cache
def _levels(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a level for each channel, uint8 [1, channels, 1, 1]. Cached because a copy to a GPU waits for the GPU."""
    return torch.tensor(values, dtype=torch.uint8, device=device)[None, :, None, None]


def grey(images: Tensor) -> Tensor:
    """Return Pillow's grey of each pixel, int32 [k, 1, height, width]."""
    red, green, blue = images.int().split(1, 1)
    return (red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16


def _blended(base: Tensor | float, images: Tensor, factors: Tensor) -> Tensor:
    """Return base + factor (image - base), for integers in `base` that broadcast with the images."""
    base = base.float() if isinstance(base, Tensor) else base
    changed = (images.float() - base).mul_(factors.float()[:, None, None, None]).add_(base)
    return changed.clamp_(0, 255).to(torch.uint8)


def _mean_grey(images: Tensor) -> Tensor:
    """Return the rounded mean of each image's grey, int64 [k, 1, 1, 1]."""
    count = images.shape[2] * images.shape[3]
    return (2 * grey(images).sum((1, 2, 3), keepdim=True) + count) // (2 * count)


def _smoothed(images: Tensor) -> Tensor:
    """Return images after Pillow's SMOOTH filter, which leaves the outermost pixels alone: int32."""
    pixels = images.int()
    height, width = images.shape[2:]
    if min(height, width) < 3:
        return pixels
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[:, :, 1:-1, 1:-1]
    sums = sums + (_SMOOTH_CENTRE - 1) * inner
    inner.copy_((2 * sums + _SMOOTH_SUM) // (2 * _SMOOTH_SUM))
    return pixels


def _auto_contrast(images: Tensor, _: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True).double(), images.amax((2, 3), keepdim=True).double()
    spread = high > low
    # `255 / tensor` multiplies by the reciprocal, which rounds twice.
    scale = torch.where(spread, torch.full_like(high, 255).div_((high - low).clamp_(min=1)), 1)
    offset = torch.where(spread, -low * scale, 0)
    return images.double().mul_(scale).add_(offset).clamp_(0, 255).to(torch.uint8)


def _equalized(images: Tensor, _: Tensor) -> Tensor:
    flat = images.reshape(3 * len(images), -1).long()
    counts = torch.zeros(len(flat), 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, flat, flat.new_ones(1, 1).expand_as(flat))
    step = (flat.shape[1] - counts.gather(1, flat.amax(1, keepdim=True))) // 255
    below = counts.cumsum(1) - counts
    levels = torch.arange(256, device=images.device)
    safe = step.clamp(min=1)
    tables = torch.where(step > 0, ((below + safe // 2) // safe).clamp_(max=255), levels)
    return tables.to(torch.uint8).gather(1, flat).view(images.shape)


def _hue_moved(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of images by parts of a circle, [k]. Rounds once, where Pillow rounds hue and saturation too."""
    pixels = images.float()
    high, low = pixels.amax(1), pixels.amin(1)
    spread = (high - low).clamp(min=1e-6)
    red, green, blue = pixels.unbind(1)
    of_green = torch.where(high == green, 2 + (blue - red) / spread, 4 + (red - green) / spread)
    sixths = torch.where(high == red, (green - blue) / spread, of_green) + 6 * turns.float()[:, None, None]
    # A channel is at its highest within a sixth of its own hue, and at its lowest from two sixths on.
    places = torch.tensor([0.0, 2.0, 4.0], device=images.device)[:, None, None]
    away = (sixths[:, None] - places).remainder(6.0)
    share = (2 - torch.minimum(away, 6 - away)).clamp_(0, 1)
    levels = low[:, None] + share * (high - low)[:, None]
    return levels.round_().clamp_(0, 255).to(torch.uint8)


def _taps(sigma: float) -> NDArray[np.float64]:
    """Return the weights of a pass of Pillow's blur, in units of 1 / _BLUR_ONE: of the middle, its neighbours, theirs.

    The blur is a box filter of fractional size, applied _BLUR_PASSES times (Gwosdek et al. 2011). Pillow computes the
    size with 32-bit floats.
    """
    variance = np.float32(np.float32(sigma) * np.float32(sigma) / np.float32(_BLUR_PASSES))
    whole = np.float32(np.floor((np.float32(np.sqrt(12.0 * float(variance) + 1.0)) - np.float32(1)) / 2.0))
    part = np.float32((2 * whole + 1) * (whole * (whole + 1) - 3 * variance))
    part = np.float32(part / (6 * (variance - (whole + 1) * (whole + 1))))
    reach = int(whole)
    inner = int(np.float32(_BLUR_ONE) / np.float32(np.float32(whole + part) * 2 + 1))
    outer = (_BLUR_ONE - (2 * reach + 1) * inner) // 2
    return np.array([*[inner] * (reach + 1), outer, 0][: _BLUR_REACH + 1], np.float64)


def _blurred(images: Tensor, taps: Tensor) -> Tensor:
    middle, near, far = taps[:, :, None, None, None].unbind(1)
    pixels = images.double()  # holds the integers of a pass
    for dim in (3, 2):
        last = images.shape[dim] - 1
        side = torch.arange(-_BLUR_REACH, last + 1 + _BLUR_REACH, device=images.device).clamp_(0, last)
        for _ in range(_BLUR_PASSES):
            edged = pixels.index_select(dim, side)
            p = [edged.narrow(dim, step, last + 1) for step in range(2 * _BLUR_REACH + 1)]
            sums = (p[1] + p[3]).mul_(near).add_((p[0] + p[4]).mul_(far)).add_(p[2] * middle)
            pixels = sums.add_(_BLUR_ONE // 2).mul_(1 / _BLUR_ONE).floor_()
    return pixels.to(torch.uint8)


def _erased(
    transform: TrainTransform, images: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor, seeds: Tensor
) -> Tensor:
    """Replace a box of each image by noise, which is standard normal after normalisation but for rounding and clipping.

    top, left, height, width: pixels of the boxes, int64 [k].
    seeds: numbers that the bytes of noise follow from, int64 [k] (`Draws.seeds`).
    """
    # As many as the largest box could need: that of these boxes is not known without waiting for the device.
    numbers = torch.arange(-(-3 * transform.size**2 // _WORD_BYTES), device=images.device)
    quantiles = mix(seeds[:, None] + numbers * GOLDEN).view(torch.uint8)
    place = torch.arange(transform.size, device=images.device)
    y, x = (place - first[:, None] for first in (top, left))
    inside = ((y >= 0) & (y < height[:, None]))[:, :, None] & ((x >= 0) & (x < width[:, None]))[:, None, :]
    channel = torch.arange(3, device=images.device)[:, None, None]
    tall, wide = height[:, None, None, None], width[:, None, None, None]
    number = channel * tall * wide + y[:, None, :, None] * wide + x[:, None, None, :]
    number = number.clamp_(0, quantiles.shape[1] - 1)
    drawn = quantiles.gather(1, number.flatten(1)).view(number.shape).long()
    noise = _noise(transform.mean, transform.std, images.device).take(drawn + 256 * channel)
    return torch.where(inside[:, None], noise, images)


@cache
def _noise(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a table from a uniform byte to a normally distributed grey level, uint8 [channels, 256].

    mean, std: of each channel, for pixels in 0..1.
    """
    channels = [NormalDist(255 * m, 255 * s) for m, s in zip(mean, std, strict=True)]
    levels = [[channel.inv_cdf((byte + 0.5) / 256) for byte in range(256)] for channel in channels]
    return torch.tensor(levels, dtype=torch.float64).round().clamp(0, 255).to(device, torch.uint8)


CHANGES: dict[str, Change] = {
    "affine": _transformed,
    "across": partial(_moved, dim=3),
    "down": partial(_moved, dim=2),
    "erase": _erased,
    **{  # those that do not depend on the transform
        name: lambda _, images, values, change=change: change(images, values)
        for name, change in {
            # A table of 256 grey levels for each image.
            "table": lambda images, tables: tables.gather(1, images.flatten(1).long()).view(images.shape),
            "AutoContrast": _auto_contrast,
            "Equalize": _equalized,
            "Color": lambda images, factors: _blended(grey(images), images, factors),
            "Contrast": lambda images, factors: _blended(_mean_grey(images), images, factors),
            "Brightness": lambda images, factors: _blended(0.0, images, factors),
            "Sharpness": lambda images, factors: _blended(_smoothed(images), images, factors),
            "Hue": _hue_moved,
            "Grayscale": lambda images, _: grey(images).to(torch.uint8).expand_as(images),
            "GaussianBlur": _blurred,
        }.items()
    },
}
"""Changes by name."""
