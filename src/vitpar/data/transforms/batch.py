"""Transforms of a batch of images on the device: normalisation, mixup and CutMix.

Sources: Zhang et al. 2018 for mixup, Yun et al. 2019 for CutMix.

Two samples of a global batch form a pair, and each becomes a mixture of both. The pairs and their mixtures depend only
on the global batch and the keys of its samples, never on the rank that computes them.
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

_GREY = 128.0  # stands for NaN
_MIX = 0x3D5A  # separates these random numbers from those of the transforms of a single sample
_WHETHER, _WHICH, _TOP, _LEFT, _WEIGHT = range(5)


@dataclass(frozen=True)
class Normalize:
    """Normalisation (pixel / 255 - mean) / std of every channel. The default maps pixels to [-1, 1].

    Raises RecipeError for a standard deviation that is not positive.
    """

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of each channel, for pixels in 0..1."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, for pixels in 0..1."""
    compiled: bool = False
    """Whether to use torch.compile: one fused kernel, which reads and writes every image once, in place of four."""

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise RecipeError(f"std {self.std} must be positive in every channel")

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return normalised images of type `dtype`, of the same shape.

        images: uint8 [batch, 3, height, width] on any device.
        """
        mean, std = _channels(self.mean, images.device), _channels(self.std, images.device)
        return (_compiled() if self.compiled else _normalized)(images, mean, std, dtype)

    def pixels(self, images: Tensor) -> Tensor:
        """Return the images, uint8, that were normalised. Values out of range are clipped, and NaN is grey."""
        mean, std = _channels(self.mean, images.device), _channels(self.std, images.device)
        return (images * std + mean).nan_to_num(_GREY).round().clamp(0, 255).to(torch.uint8)


def _normalized(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    return images.float().sub(mean).div_(std).to(dtype)


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]:
    return torch.compile(_normalized)


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values in 0..1 scaled to 0..255, float [3, 1, 1] on `device`.

    The result is cached because a copy to a GPU waits for the GPU.
    """
    return torch.tensor(values, device=device).mul_(255)[:, None, None]


@dataclass(frozen=True)
class Mixed:
    """Mixture of the images of a global batch."""

    partners: NDArray[np.int64]
    """Row that each row is paired with, int64 [batch]; the row itself if it has no partner."""
    weights: NDArray[np.float64]
    """Share of the row's own image in the mixture, from 0 to 1, float64 [batch]; 1 for a row that is not mixed."""
    boxes: NDArray[np.int64]
    """Box that the partner's pixels replace (CutMix), int64 [batch, 4]: top, left, bottom and right, in pixels.

    All zeros for rows that are blended (mixup) or not mixed.
    """

    def labels(self, labels: Tensor, ignored: int) -> Tensor:
        """Return each row's label, its partner's label and the weight of the former, float64 [batch, 3].

        labels: int64 [batch].
        ignored: label of rows to ignore; if one label of a pair is `ignored`, both become so.
        """
        others = labels[_sent(self.partners, labels)]
        gone = (labels == ignored) | (others == ignored)
        both = (x.masked_fill(gone, ignored).double() for x in (labels, others))
        return torch.stack([*both, _sent(self.weights, labels)], 1)

    def images(self, images: Tensor, here: Sequence[int], rows: int) -> Tensor:
        """Return the first `rows` images, mixed.

        images: float [n, channels, height, width].
        here: row of the global batch that each of `images` is, as `Mix.needed` returns them.
        rows: number of images to mix; the others are only partners.
        """
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
    """Copy `array` to the device of `beside`, asynchronously from pinned memory if that is a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(beside.device, non_blocking=True) if beside.is_cuda else tensor


@dataclass(frozen=True)
class Mix:
    """Settings of mixup and CutMix. Falsy if both are off."""

    mixup: float = 0.0
    """Alpha of the Beta distribution of mixup's weights; 0 turns mixup off."""
    cutmix: float = 0.0
    """Alpha of the Beta distribution of CutMix's weights; 0 turns CutMix off."""
    probability: float = 1.0
    """Probability that a pair is mixed at all."""
    switch: float = 0.5
    """Probability of CutMix in place of mixup if both are on."""
    apart: int = 1
    """Distance between the two rows of a pair, in rows."""

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def needed(self, rows: Sequence[int], batch: int) -> list[int]:
        """Return `rows` of a batch of size `batch`, followed by those of their partners that are not among them."""
        others = self.partners(batch)[list(rows)]
        return [*rows, *np.setdiff1d(others, list(rows)).tolist()]

    def partners(self, batch: int) -> NDArray[np.int64]:
        """Return the partner of each row of a batch, int64 [batch]; the row itself if it has none."""
        rows = np.arange(batch)
        others = np.where(rows // self.apart % 2 == 0, rows + self.apart, rows - self.apart)
        return np.where(others < batch, others, rows)

    def __call__(self, keys: NDArray[np.int64], size: int) -> Mixed:
        """Draw the mixture of a global batch.

        keys: random keys of its samples, int64 [batch].
        size: height and width of the images in pixels.
        """
        partners, rows = self.partners(len(keys)), np.arange(len(keys))
        pair = keys[np.minimum(rows, partners)] ^ keys[np.maximum(rows, partners)] ^ _MIX  # same for both
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
        # A box is clipped at the edges of the image, so the weight follows from the area that is left.
        weights[cuts] = 1 - (bottom - top) * (right - left) / size**2
        return Mixed(partners, weights, boxes)
