"""From decoded pixels to an image of the model's size.

Images stay uint8, a quarter of the bytes to move; they are normalised on the device.
Resizing is torch's antialiased uint8 kernel, which agrees with Pillow's to one grey level and takes a third of the
time.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.randomness import Draws
from vitpar.errors import RecipeError

Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class TrainTransform:
    """Random-resized crop and horizontal flip, as in Szegedy et al. 2015 and torchvision's RandomResizedCrop.

    size: height and width of the result. scale: range of the crop's share of the image's area. ratio: range of the
    crop's width over height. flip: probability of a horizontal flip. Raises RecipeError when a setting is out of its
    range.
    """

    size: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        _check_size(self.size, self.interpolation)
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise RecipeError(f"crop scale {self.scale} must be a range within (0, 1], such as (0.08, 1.0)")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise RecipeError(f"crop ratio {self.ratio} must be a range of positive numbers, such as (0.75, 1.33)")
        if not 0 <= self.flip <= 1:
            raise RecipeError(f"flip {self.flip} is not a probability: choose a number from 0 to 1")

    def __call__(self, image: NDArray[np.uint8], draws: Draws) -> Tensor:
        """image: uint8 [height, width, 3]. draws: the sample's own randomness. Returns uint8 [3, size, size]."""
        top, left, height, width = self._crop(image.shape[0], image.shape[1], draws)
        pixels = _resize(image[top : top + height, left : left + width], self.size, self.size, self.interpolation)
        return pixels.flip(-1) if draws.uniform() < self.flip else pixels

    def _crop(self, height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the first of ten random boxes that fits, else of the largest central one."""
        for _ in range(10):
            area = height * width * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return draws.below(height - h + 1), draws.below(width - w + 1), h, w
        h = min(height, max(1, round(width / self.ratio[0])))
        w = min(width, max(1, round(height * self.ratio[1])))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class EvalTransform:
    """Resize the shorter side to size / crop_pct, then cut out the centre; an image of the right size is left alone.

    Raises RecipeError when a setting is out of its range.
    """

    size: int
    crop_pct: float = 0.875
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        _check_size(self.size, self.interpolation)
        if not 0 < self.crop_pct <= 1:
            raise RecipeError(f"crop_pct {self.crop_pct} is out of range: choose a number above 0 and at most 1")

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """image: uint8 [height, width, 3]. Returns uint8 [3, size, size]."""
        height, width, _ = image.shape
        if height == width == self.size:
            return torch.from_numpy(image).permute(2, 0, 1)
        short = math.floor(self.size / self.crop_pct)
        scale = short / min(height, width)
        tall, wide = max(short, int(height * scale)), max(short, int(width * scale))
        pixels = _resize(image, tall, wide, self.interpolation)
        top, left = round((tall - self.size) / 2), round((wide - self.size) / 2)
        return pixels[:, top : top + self.size, left : left + self.size]


@dataclass(frozen=True)
class Normalize:
    """(pixel / 255 - mean) / std for every channel. The default maps pixels to [-1, 1]."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise RecipeError(f"std {self.std} must be positive in every channel")

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """images: uint8 [batch, 3, height, width] on any device. Returns `dtype`, of the same shape."""
        mean, std = _channels(self.mean, images.device), _channels(self.std, images.device)
        return ((images.float() - mean) / std).to(dtype)


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """0..1 values as 0..255 ones, [3, 1, 1] on `device`; made once, since copying to a GPU waits for it."""
    return torch.tensor(values, device=device).mul_(255)[:, None, None]


def _resize(image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation) -> Tensor:
    """uint8 [h, w, 3] -> uint8 [3, height, width]; no resampling where the size is right already."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)
    if image.shape[:2] == (height, width):
        return pixels
    return F.interpolate(pixels[None], (height, width), mode=interpolation, antialias=True)[0]


def _check_size(size: int, interpolation: str) -> None:
    if size < 1:
        raise RecipeError(f"image size {size} is not a positive number of pixels")
    if interpolation not in ("bicubic", "bilinear"):
        raise RecipeError(f"unknown interpolation '{interpolation}': use bicubic or bilinear")
