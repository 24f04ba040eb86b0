"""Batches that their device makes: images in its memory or the host's, and what to do with them.

The host draws all random choices of `TrainTransform`, of which those of an image depend on its key alone, and sends
them in one copy. The device then computes without waiting for the host. Crops of stored images of one size have the
host's pixels, bit by bit.

Sources: Szegedy et al. 2015 and torchvision's RandomResizedCrop; with `padding` torchvision's RandomCrop with
`pad_if_needed`; Zhong et al. 2020 for random erasing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.randomness import Draws
from vitpar.data.transforms import Interpolation
from vitpar.data.transforms.operations import CHANGES, arguments
from vitpar.data.transforms.policies import Step

if TYPE_CHECKING:
    from vitpar.data.transforms.sample import TrainTransform

Numbers = NDArray[np.int64]
Work = list[tuple[str, tuple[NDArray[Any], ...]]]
"""Parts of the work for a batch, in order: the name of a change and its arrays, of which the first numbers images."""
_ERASED_SHARE = 0.02, 1 / 3  # range of the erased fraction of the image's area
_ERASED_RATIO = 0.3  # height over width of the erased box, from this to its inverse
_TRIES = 10  # random boxes that are tried for a crop or an erased part
_WORD = 8  # bytes of a number
_ZEROS = np.zeros(_WORD, np.uint8)  # fill the last word of an array
_PIXELS = {"cpu": 1 << 15, "cuda": 1 << 21}
"""Pixels of images that are changed at once: on a CPU so few that its cache holds all steps of a change, on a GPU so
many that it is busy, in up to 330 MB."""


def draw_crops(transform: TrainTransform, draws: Draws, heights: Numbers, widths: Numbers) -> Numbers:
    """Draw the crops of images by their heights and widths in pixels, int64 [n].

    Returns top, left, height and width of each crop, and 1 if it is flipped, else 0: int64 [5, n]. The crop begins
    outside of the image if top or left is negative.
    """
    crop = _draw_resized if transform.padding is None else _draw_padded
    return np.stack([*crop(transform, draws, heights, widths), draws.uniform() < transform.flip])


def _draw_padded(transform: TrainTransform, draws: Draws, *sides: Numbers) -> list[Numbers]:
    assert transform.padding is not None, "crops are padded"
    starts = []
    for side in sides:
        # A side that is too short with `padding` gets what it lacks once more on both ends, as in torchvision.
        border = transform.padding + np.maximum(0, transform.size - side - 2 * transform.padding)
        starts.append(draws.below(side + 2 * border - transform.size + 1) - border)
    return [*starts, *np.full((2, len(draws)), transform.size)]


def _draw_resized(transform: TrainTransform, draws: Draws, heights: Numbers, widths: Numbers) -> Numbers:
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
    erased = _draw_erased(transform, draws)
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


def _draw_erased(transform: TrainTransform, draws: Draws) -> Numbers:
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
