"""Batches that their device makes: images in its memory or the host's, and what to do with them.

The host draws all random choices and sends them in one copy. The device then computes without waiting for the host.
Crops of stored images of one size have the host's pixels, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.transforms import Interpolation
from vitpar.data.transforms.choices import Work
from vitpar.data.transforms.operations import CHANGES

_WORD = 8  # bytes of a number
_ZEROS = np.zeros(_WORD, np.uint8)  # fill the last word of an array
_PIXELS = {"cpu": 1 << 15, "cuda": 1 << 21}
"""Pixels of images that are changed at once: on a CPU so few that its cache holds all steps of a change, on a GPU so
many that it is busy, in up to 330 MB."""


class DrawnBatch:
    """Images of a batch that their device will make.

    images: uint8 [images, 3, height, width] to begin with. Those that are not stored are changed in place.
    work: what to do with them.
    transform: the transform that has drawn the work.
    """

    def __init__(self, images: Tensor, work: Work, transform: Any) -> None:
        self.images, self._transform = images, transform
        self._layout = list[tuple[str, list[tuple[torch.dtype, tuple[int, ...]]]]]()
        parts = list[NDArray[np.uint8]]()
        for name, arrays in work:
            tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
            self._layout.append((name, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
            for tensor in tensors:
                raw = tensor.view(-1).view(torch.uint8).numpy()
                parts += [raw, _ZEROS[: -len(raw) % _WORD]]
        self._packed = torch.from_numpy(np.concatenate(parts))

    def made(self, sent: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """Return the images, uint8 [n, 3, size, size].

        sent: copies a tensor of the host to the device; not called for images that are there.
        """
        packed, begin = sent(self._packed), 0
        images = self.images if self.images.device == packed.device else sent(self.images)
        for name, layout in self._layout:
            arrays = []
            for dtype, shape in layout:
                length = math.prod(shape) * dtype.itemsize
                arrays.append(packed[begin : begin + length].view(dtype).view(shape))
                begin += -(-length // _WORD) * _WORD
            images = self._changed(name, images, arrays)
        return images

    def _changed(self, name: str, images: Tensor, arrays: list[Tensor]) -> Tensor:
        at_once = max(1, _PIXELS.get(images.device.type, _PIXELS["cuda"]) // self._transform.size**2)
        parts = [*zip(*(array.split(at_once) for array in arrays), strict=True)]
        if name in _STORED:
            return torch.cat([_STORED[name](self._transform, images, *part) for part in parts])
        for rows, *values in parts:
            changed = CHANGES[name](self._transform, images.index_select(0, rows), *values)
            if images.device.type == "cpu":  # torch's copy moves one byte after the other
                images.numpy()[rows.numpy()] = changed.numpy()
            else:
                images.index_copy_(0, rows, changed)
        return images


def _padded_crops(transform: Any, stored: Tensor, samples: Tensor, top: Tensor, left: Tensor, flips: Tensor) -> Tensor:
    """Return crops with black borders, uint8 [n, 3, size, size].

    stored: uint8 [images, 3, height, width].
    samples: number of the stored image of each crop, int64 [n].
    top, left, flips: as `draw_crops` returns them.
    """
    place = torch.arange(transform.size, device=stored.device)
    columns = left[:, None] + torch.where(flips[:, None] > 0, transform.size - 1 - place, place)
    return _pixels(stored, samples, top[:, None] + place, columns)


def _resized_crops(transform: Any, stored: Tensor, samples: Tensor, *crops: Tensor) -> Tensor:
    """Return crops of any height and width, resized with one of DEVICE_KERNELS. Arguments are those of `_padded_crops`.

    crops: as `draw_crops` returns them. Pillow and torch resample rows first, and round in between.
    """
    top, left, height, width, flips = crops
    size, kernel = transform.size, transform.interpolation
    tall, wide = stored.shape[2:]
    rows, columns = (
        first[:, None] + torch.arange(side, device=stored.device) for first, side in ((top, tall), (left, wide))
    )
    across, down = (_weights(side, size, kernel, stored.device) for side in (wide, tall))
    pixels = _pixels(stored, samples, rows, columns).to(across.dtype)
    weights = across.index_select(0, width - 1 + wide * flips)
    pixels = _rounded(torch.bmm(pixels.view(len(pixels), 3 * tall, wide), weights.transpose(1, 2)))
    weights = down.index_select(0, height - 1)
    return _rounded(torch.matmul(weights[:, None], pixels.view(-1, 3, tall, size))).to(torch.uint8)


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
    unit = torch.eye(pixels, dtype=torch.float64)[:, None, None]
    weights = np.zeros((size, side))
    weights[:, :pixels] = F.interpolate(unit, (1, size), mode=kernel, antialias=True)[:, 0, 0].T
    # As many bits after the point as 16-bit integers have room for.
    bits = 0
    while bits < 22 and int(0.5 + weights.max() * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    scaled = weights * (1 << bits)
    return np.trunc(scaled + np.copysign(0.5, scaled)) / (1 << bits)


_STORED: dict[str, Callable[..., Tensor]] = {
    "padded crop": _padded_crops,
    "resized crop": _resized_crops,
    "take": lambda transform, stored, samples: stored.index_select(0, samples),
}
"""Ways to begin with stored images."""
