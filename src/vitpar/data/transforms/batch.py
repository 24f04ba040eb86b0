"""Transforms of a batch of uint8 images, on the device: normalisation, mixup (Zhang et al. 2018) and CutMix (Yun et al.
2019).

Two samples of a global batch form a pair, and each becomes a mixture of both. Which two, and how, follows from the
batch and from the keys of its samples: never from who computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.randomness import betas, uniforms
from vitpar.errors import RecipeError

_MIX = 0x3D5A  # sets these numbers apart from those of a sample's own pixels
_WHETHER, _WHICH, _TOP, _LEFT, _WEIGHT = range(5)


@dataclass(frozen=True)
class Normalize:
    """(pixel / 255 - mean) / std for every channel. The default maps pixels to [-1, 1].

    compiled: whether it is one operation of the compiler's, which reads and writes every image once, and not four.
    """

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    compiled: bool = False

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise RecipeError(f"std {self.std} must be positive in every channel")

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """images: uint8 [batch, 3, height, width] on any device. Returns `dtype`, of the same shape."""
        mean, std = _channels(self.mean, images.device), _channels(self.std, images.device)
        return (_compiled() if self.compiled else _normalized)(images, mean, std, dtype)


def _normalized(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    return images.float().sub(mean).div_(std).to(dtype)


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]:
    return torch.compile(_normalized)


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """0..1 values as 0..255 ones, [3, 1, 1] on `device`; made once, since copying to a GPU waits for it."""
    return torch.tensor(values, device=device).mul_(255)[:, None, None]


@dataclass(frozen=True)
class Mixed:
    """Mixture of the images of a batch. All is of the global batch.

    partners: int64 [batch], the row that each is mixed with; its own where it stays as it is. weights: float64 [batch],
    what is left of the row itself, from 0 to 1. boxes: int64 [batch, 4], top, left, bottom and right of what a partner
    covers in pixels; empty where colours are blended instead.
    """

    partners: NDArray[np.int64]
    weights: NDArray[np.float64]
    boxes: NDArray[np.int64]

    def labels(self, labels: Tensor, ignored: int) -> Tensor:
        """labels: int64 [batch]. Returns float64 [batch, 3]: a row's label, its partner's, and the weight of the first;
        `ignored` where either is."""
        others = labels[_sent(self.partners, labels)]
        gone = (labels == ignored) | (others == ignored)
        both = (x.masked_fill(gone, ignored).double() for x in (labels, others))
        return torch.stack([*both, _sent(self.weights, labels)], 1)

    def images(self, images: Tensor, here: Sequence[int], rows: int) -> Tensor:
        """The first `rows` of `images`, mixed. images: normalised [n, channels, height, width], row i of which is row
        ``here[i]`` of the batch, as `Mix.needed` has them."""
        place = {row: number for number, row in enumerate(here)}
        own = np.array(here[:rows], np.int64)
        others = images[_sent(np.array([place[p] for p in self.partners[own].tolist()], np.int64), images)]
        weights = _sent(self.weights[own], images).to(images.dtype)[:, None, None, None]
        blended = torch.lerp(others, images[:rows], weights)
        if not self.boxes[own].any():
            return blended
        top, left, bottom, right = _sent(self.boxes[own], images).T[:, :, None]
        y, x = (torch.arange(n, device=images.device) for n in images.shape[-2:])
        inside = ((y >= top) & (y < bottom))[:, :, None] & ((x >= left) & (x < right))[:, None, :]
        pasted = torch.where(inside[:, None], others, images[:rows])
        cut = _sent(np.any(self.boxes[own], axis=1), images)[:, None, None, None]
        return torch.where(cut, pasted, blended)


def _sent(array: NDArray, beside: Tensor) -> Tensor:
    """`array` on the device of `beside`, without waiting for a GPU to finish its work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(beside.device, non_blocking=True) if beside.is_cuda else tensor


@dataclass(frozen=True)
class Mix:
    """mixup, cutmix: alpha of the Beta distribution of weights, 0 for none of it. probability: that a pair is mixed at
    all. switch: that it is by CutMix where there are both. apart: how many rows lie between the two of a pair.

    Raises RecipeError for a setting out of its range.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    probability: float = 1.0
    switch: float = 0.5
    apart: int = 1

    def __post_init__(self) -> None:
        if min(self.mixup, self.cutmix) < 0:
            raise RecipeError(f"mixup {self.mixup} and cutmix {self.cutmix} must not be negative: 0 is for none")
        for name in ("probability", "switch"):
            if not 0 <= getattr(self, name) <= 1:
                raise RecipeError(f"mix {name} {getattr(self, name)} is not a probability: choose from 0 to 1")

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def needed(self, rows: Sequence[int], batch: int) -> list[int]:
        """`rows` of a batch, and after them the partners of theirs that are not among them."""
        others = self.partners(batch)[list(rows)]
        return [*rows, *np.setdiff1d(others, list(rows)).tolist()]

    def partners(self, batch: int) -> NDArray[np.int64]:
        """Return the partner of each row of a batch, int64 [batch]; the row itself where it has none."""
        rows = np.arange(batch)
        others = np.where(rows // self.apart % 2 == 0, rows + self.apart, rows - self.apart)
        return np.where(others < batch, others, rows)

    def __call__(self, keys: NDArray[np.int64], size: int) -> Mixed:
        """keys: int64 [batch], of a batch's samples. size: of the images in pixels."""
        partners, rows = self.partners(len(keys)), np.arange(len(keys))
        pair = keys[np.minimum(rows, partners)] ^ keys[np.maximum(rows, partners)] ^ _MIX  # equal for both
        mixes = (partners != rows) & (uniforms(pair, _WHETHER) < self.probability)
        cuts = mixes & (not self.mixup or (uniforms(pair, _WHICH) < self.switch if self.cutmix else False))
        weights, boxes = np.ones(len(keys)), np.zeros((len(keys), 4), np.int64)
        for chosen, alpha in ((mixes & ~cuts, self.mixup), (cuts, self.cutmix)):
            if chosen.any():
                weights[chosen] = betas(pair[chosen], alpha, _WEIGHT)
        side = (size * np.sqrt(1 - weights[cuts])).astype(np.int64)
        for place, which in ((0, _TOP), (1, _LEFT)):
            begin = (size * uniforms(pair[cuts], which)).astype(np.int64) - side // 2
            boxes[cuts, place], boxes[cuts, place + 2] = begin.clip(0, size), (begin + side).clip(0, size)
        top, left, bottom, right = boxes[cuts].T
        weights[cuts] = 1 - (bottom - top) * (right - left) / size**2  # what is outside of the image is cut off
        return Mixed(partners, weights, boxes)
