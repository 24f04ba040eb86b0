"""Batches that their device makes: images in its memory or the host's, and what to do with them.

The host draws all random choices and sends them in one copy. The device then computes without waiting for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.transforms.choices import Changes, Crops
from vitpar.data.transforms.operations import CHANGES, Change, arguments
from vitpar.data.transforms.settings import EvalSettings, TrainSettings
from vitpar.data.transforms.stored_crops import padded_crops, resized_crops

_WORD = 8  # bytes of a number
_ZEROS = np.zeros(_WORD, np.uint8)  # fill the last word of an array
_PIXELS = {"cpu": 1 << 15, "cuda": 1 << 21}
"""Pixels of images that are changed at once: on a CPU so few that its cache holds all steps of a change, on a GPU so
many that it is busy, in up to 330 MB."""

Work = list[tuple[str, tuple[NDArray[Any], ...]]]
"""Parts of the work for a batch, in order: the name of a change and its arrays, of which the first numbers images."""

_CROPS: dict[str, Change] = {
    "padded crop": padded_crops,
    "resized crop": resized_crops,
    "take": lambda settings, stored, samples: stored.index_select(0, samples),
}
"""Ways to begin with stored images."""


def crops_of(settings: TrainSettings, samples: NDArray[np.int64], crops: Crops) -> Work:
    """Return the work of cropping stored images of one size, by their numbers, int64 [n]."""
    flips = crops.flips.astype(np.int64)
    if settings.padding is not None:
        return [("padded crop", (samples, crops.top, crops.left, flips))]
    return [("resized crop", (samples, crops.top, crops.left, crops.height, crops.width, flips))]


def work_of(settings: TrainSettings, changes: Changes) -> Work:
    """Return the work of changing images after their crop."""
    work: Work = []
    for step in changes.steps:
        groups: dict[str, list[tuple[NDArray[np.int64], NDArray[Any]]]] = {}
        for name, (rows, values) in step.items():
            change, rows_of = arguments(name, values, settings.size)
            groups.setdefault(change, []).append((rows, rows_of))
        for change, parts in groups.items():
            rows, values = (np.concatenate(one) for one in zip(*parts, strict=True))
            work.append((change, (rows, values)))
    if len(changes.erased.rows):
        work.append(("erase", tuple(vars(changes.erased).values())))
    return work


class DrawnBatch:
    """Images of a batch that their device will make.

    images: uint8 [images, 3, height, width] to begin with. Those that are not stored are changed in place.
    work: what to do with them.
    settings: of the transform.
    """

    def __init__(self, images: Tensor, work: Work, settings: TrainSettings | EvalSettings) -> None:
        self.images, self._settings = images, settings
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
        at_once = max(1, _PIXELS.get(images.device.type, _PIXELS["cuda"]) // self._settings.size**2)
        parts = [*zip(*(array.split(at_once) for array in arrays), strict=True)]
        if name in _CROPS:
            return torch.cat([_CROPS[name](self._settings, images, *part) for part in parts])
        for rows, *values in parts:
            changed = CHANGES[name](self._settings, images.index_select(0, rows), *values)
            if images.device.type == "cpu":  # torch's copy moves one byte after the other
                images.numpy()[rows.numpy()] = changed.numpy()
            else:
                images.index_copy_(0, rows, changed)
        return images
