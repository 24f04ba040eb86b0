"""Crops of stored images of one size, many at once, on the device that holds them: the host's pixels, bit by bit."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.transforms.names import Interpolation
from vitpar.data.transforms.settings import TrainSettings

_SUPPORTS = {"bicubic": 2.0, "bilinear": 1.0}


def padded_crops(
    settings: TrainSettings, stored: Tensor, samples: Tensor, top: Tensor, left: Tensor, flips: Tensor
) -> Tensor:
    """Return crops with black borders, uint8 [n, 3, size, size].

    stored: uint8 [images, 3, height, width].
    samples: number of the stored image of each crop, int64 [n].
    top, left: first row and column of pixels of each crop, int64 [n], which may be outside of the image.
    flips: 1 for a crop that is flipped and 0 for another, int64 [n].
    """
    place = torch.arange(settings.size, device=stored.device)
    rows = top[:, None] + place
    columns = left[:, None] + torch.where(flips[:, None] > 0, settings.size - 1 - place, place)
    return _pixels(stored, samples, rows, columns)


def resized_crops(
    settings: TrainSettings,
    stored: Tensor,
    samples: Tensor,
    top: Tensor,
    left: Tensor,
    height: Tensor,
    width: Tensor,
    flips: Tensor,
) -> Tensor:
    """Return crops of any height and width, resized with one of DEVICE_KERNELS. Arguments are those of `padded_crops`.

    height, width: pixels of each crop before it is resized, int64 [n].
    """
    size, kernel = settings.size, settings.interpolation
    rows, columns = (
        first[:, None] + torch.arange(side, device=stored.device)
        for first, side in zip((top, left), stored.shape[2:], strict=True)
    )
    tall, wide = stored.shape[2:]
    across = _weights(wide, size, kernel, stored.device)
    down = _weights(tall, size, kernel, stored.device)
    pixels = _pixels(stored, samples, rows, columns).to(across.dtype)
    # Pillow and torch resample rows first, and round in between.
    weights = across.index_select(0, width - 1 + wide * flips)
    pixels = _rounded(torch.bmm(pixels.view(len(pixels), 3 * tall, wide), weights.transpose(1, 2)))
    pixels = pixels.view(-1, 3, tall, size)
    weights = down.index_select(0, height - 1)
    return _rounded(torch.matmul(weights[:, None], pixels)).to(torch.uint8)


def _pixels(stored: Tensor, samples: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return pixels of stored images, uint8 [n, 3, rows, columns], black outside of them.

    rows, columns: numbers of rows and columns of each image, int64 [n, …].
    """
    _, channels, height, width = stored.shape
    planes = samples[:, None] * channels + torch.arange(channels, device=stored.device)
    lines = planes[:, :, None] * height + rows.clamp(0, height - 1)[:, None]
    # Complete rows are copied first, which is fast; then columns are chosen.
    wide = stored.view(-1, width).index_select(0, lines.flatten()).view(len(samples), -1, width)
    places = columns.clamp(0, width - 1)[:, None].expand(-1, wide.shape[1], -1)
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None]
    return wide.gather(2, places).view(len(samples), channels, rows.shape[1], columns.shape[1]).mul_(inside)


def _rounded(pixels: Tensor) -> Tensor:
    return pixels.add_(0.5).floor_().clamp_(0, 255)


@cache
def _weights(side: int, size: int, kernel: Interpolation, device: torch.device) -> Tensor:
    """Return the weights that resize 1 … `side` pixels to `size`: [2 side, size, side], the second half flipped.

    They are those of torch's kernel for uint8: multiples of a power of two, so that sums of products with pixels are
    exact in any order. A GPU may round products of 32-bit floats, so it gets 64 bits.
    """
    tables = np.stack([_kernel_weights(pixels, size, kernel, side) for pixels in range(1, side + 1)])
    both = torch.from_numpy(np.concatenate([tables, tables[:, ::-1]]))
    return both.to(device, torch.float64 if device.type == "cuda" else torch.float32)


def _kernel_weights(pixels: int, size: int, kernel: Interpolation, side: int) -> NDArray[np.float64]:
    scale = pixels / size
    stretch = max(scale, 1.0)
    support = _SUPPORTS[kernel] * stretch
    weights = np.zeros((size, side))
    for place in range(size):
        centre = scale * (place + 0.5)
        first, last = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), pixels)
        found = np.array([_filter((x - centre + 0.5) * (1 / stretch), kernel) for x in range(first, last)])
        weights[place, first:last] = found / found.sum()
    # As many bits after the point as 16-bit integers have room for.
    bits = 0
    while bits < 22 and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = weights * (1 << bits)
    return np.trunc(scaled + np.copysign(0.5, scaled)) / (1 << bits)


def _filter(x: float, kernel: Interpolation) -> float:
    """Return the kernel at distance x; Keys' cubic (1981) with a = -0.5 for bicubic."""
    x = abs(x)
    if kernel == "bilinear":
        return max(0.0, 1 - x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0
