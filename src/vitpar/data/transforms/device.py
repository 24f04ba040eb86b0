"""`TrainTransform` of many images of one size at once, on the device that holds them.

The host draws all random choices (`batch_draws`) and sends them in one copy. The device then computes the same pixels,
bit by bit, as the transform of single images, without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.randomness import SCRAMBLE, STEP
from vitpar.data.transforms.batch_draws import draw_batch
from vitpar.data.transforms.device_operations import CHANGES, affine, arguments
from vitpar.data.transforms.names import Interpolation
from vitpar.data.transforms.sample import noise_levels
from vitpar.data.transforms.settings import TrainSettings

_SUPPORTS = {"bicubic": 2.0, "bilinear": 1.0}
_WORD = 8  # bytes of a number
_CACHED_PIXELS = 1 << 15  # pixels of images that a core changes at once, so that its cache holds all steps of a change

Work = list[tuple[str, tuple[NDArray[Any], ...]]]
"""Names of parts of the work for a batch, in order, with their arrays."""
Run = Callable[[str, Tensor, Sequence[Tensor]], Tensor]
"""Function that does a part of the work: from its name, the images and the arrays to new images."""


class DrawnBatch:
    """Images of a batch that their device will make, with what it needs for that in one array to send.

    stored: uint8 [images, 3, height, width].
    work: what to do, beginning with `stored`.
    run: does a part of it.
    """

    def __init__(self, stored: Tensor, work: Work, run: Run) -> None:
        self._stored, self._run = stored, run
        self.on_cpu = stored.device.type == "cpu"
        """Whether the images are in the memory of the host."""
        self._layout = list[tuple[str, list[tuple[torch.dtype, tuple[int, ...]]]]]()
        parts = list[NDArray[np.uint8]]()
        for name, arrays in work:
            tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
            self._layout.append((name, [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
            for tensor in tensors:
                raw = tensor.view(-1).view(torch.uint8).numpy()
                parts.append(np.pad(raw, (0, -len(raw) % _WORD)))
        self.packed = torch.from_numpy(np.concatenate(parts))
        """All arrays, uint8."""

    def made(self, sent: Tensor) -> Tensor:
        """Return the images, uint8 [n, 3, size, size].

        sent: `packed` on the device of the images.
        """
        images, begin = self._stored, 0
        for name, layout in self._layout:
            arrays = []
            for dtype, shape in layout:
                length = math.prod(shape) * dtype.itemsize
                arrays.append(sent[begin : begin + length].view(dtype).view(shape))
                begin += -(-length // _WORD) * _WORD
            images = self._run(name, images, arrays)
        return images


def taken(stored: Tensor, samples: NDArray[np.int64]) -> DrawnBatch:
    """Return the images of `samples` as they are; of -1, for padding, the last one.

    stored: uint8 [images, 3, size, size].
    """
    return DrawnBatch(stored, [("take", (samples % len(stored),))], _take)


def _take(_: str, stored: Tensor, arrays: Sequence[Tensor]) -> Tensor:
    return stored.index_select(0, arrays[0])


class DeviceTransform:
    """Transform of batches of images of one size.

    settings: as for `TrainTransform`, with one of DEVICE_KERNELS if crops are resized.
    stored: uint8 [images, 3, height, width].
    """

    def __init__(self, settings: TrainSettings, stored: Tensor) -> None:
        self._settings, self._stored = settings, stored
        self._shape: tuple[int, int] = (stored.shape[2], stored.shape[3])
        self._crops: dict[str, Callable[..., Tensor]] = {
            "padded crop": self._padded_crop,
            "resized crop": self._resized_crop,
        }

    def draw(self, samples: NDArray[np.int64], keys: NDArray[np.int64]) -> DrawnBatch:
        """Return what to do for a batch. Any thread may draw.

        samples: numbers of the stored images, int64 [n].
        keys: random keys, int64 [n].
        """
        s = self._settings
        choices = draw_batch(s, keys, *self._shape)
        flips = choices.flips.astype(np.int64)
        work: Work = [("padded crop", (samples, choices.top, choices.left, flips))]
        if s.padding is None:
            sizes = choices.height, choices.width
            work = [("resized crop", (samples, choices.top, choices.left, *sizes, flips))]
        for step in choices.steps:
            groups: dict[str, list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
            for name, (rows, values) in step.items():
                change, rows_of = arguments(name, values, s.size)
                groups.setdefault(change, []).append((rows, rows_of))
            for change, parts in groups.items():
                rows, values = (np.concatenate(one) for one in zip(*parts, strict=True))
                work.append((change, (rows, values)))
        erased = choices.erased
        if len(erased.rows):
            work.append(("erase", tuple(vars(erased).values())))
        return DrawnBatch(self._stored, work, self._run)

    def _run(self, name: str, images: Tensor, arrays: Sequence[Tensor]) -> Tensor:
        at_once = len(arrays[0]) if images.is_cuda else max(1, _CACHED_PIXELS // self._settings.size**2)
        parts = [*zip(*(array.split(at_once) for array in arrays), strict=True)]
        if name in self._crops:
            return torch.cat([self._crops[name](images, *part) for part in parts])
        for rows, *values in parts:
            images.index_copy_(0, rows, self._changed(name, images.index_select(0, rows), values))
        return images

    def _changed(self, name: str, images: Tensor, values: Sequence[Tensor]) -> Tensor:
        if name == "affine":
            return affine(images, values[0], self._settings.fill)
        return self._erase(images, *values) if name == "erase" else CHANGES[name](images, *values)

    def _padded_crop(self, stored: Tensor, samples: Tensor, top: Tensor, left: Tensor, flips: Tensor) -> Tensor:
        place = torch.arange(self._settings.size, device=stored.device)
        rows = top[:, None] + place
        columns = left[:, None] + torch.where(flips[:, None] > 0, self._settings.size - 1 - place, place)
        return _pixels(stored, samples, rows, columns)

    def _resized_crop(
        self,
        stored: Tensor,
        samples: Tensor,
        top: Tensor,
        left: Tensor,
        height: Tensor,
        width: Tensor,
        flips: Tensor,
    ) -> Tensor:
        size, kernel = self._settings.size, self._settings.interpolation
        rows, columns = (
            first[:, None] + torch.arange(side, device=stored.device)
            for first, side in zip((top, left), self._shape, strict=True)
        )
        tall, wide = self._shape
        across = _weights(wide, size, kernel, stored.device)
        down = _weights(tall, size, kernel, stored.device)
        pixels = _pixels(stored, samples, rows, columns).to(across.dtype)
        # Pillow and torch resample rows first, and round in between.
        weights = across.index_select(0, width - 1 + wide * flips)
        pixels = _rounded(torch.bmm(pixels.view(len(pixels), 3 * tall, wide), weights.transpose(1, 2)))
        pixels = pixels.view(-1, 3, tall, size)
        weights = down.index_select(0, height - 1)
        return _rounded(torch.matmul(weights[:, None], pixels)).to(torch.uint8)

    def _erase(
        self,
        images: Tensor,
        top: Tensor,
        left: Tensor,
        height: Tensor,
        width: Tensor,
        seeds: Tensor,
    ) -> Tensor:
        """Replace boxes by noise, whose bytes are those of `Draws.bytes`."""
        # As many as the largest box could need: that of these boxes is not known without waiting for the device.
        numbers = torch.arange(-(-3 * self._settings.size**2 // _WORD), device=images.device)
        words = seeds[:, None] + numbers * STEP
        for shift, factor in SCRAMBLE:
            words = words ^ ((words >> shift) & ((1 << (64 - shift)) - 1))  # the sign is not to be shifted in
            words = words * factor
        quantiles = words.view(torch.uint8)
        place = torch.arange(self._settings.size, device=images.device)
        y, x = (place - first[:, None] for first in (top, left))
        inside = ((y >= 0) & (y < height[:, None]))[:, :, None] & ((x >= 0) & (x < width[:, None]))[:, None, :]
        channel = torch.arange(3, device=images.device)[:, None, None]
        tall, wide = height[:, None, None, None], width[:, None, None, None]
        number = channel * tall * wide + y[:, None, :, None] * wide + x[:, None, None, :]
        number = number.clamp_(0, quantiles.shape[1] - 1)
        drawn = quantiles.gather(1, number.flatten(1)).view(number.shape).long()
        noise = _noise(self._settings.mean, self._settings.std, images.device).take(drawn + 256 * channel)
        return torch.where(inside[:, None], noise, images)


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
def _noise(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.from_numpy(noise_levels(mean, std)).to(device)


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
