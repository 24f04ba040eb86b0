"""Settings of the transforms with their ranges, without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.data.transforms.names import PILLOW_KERNELS, CropMode, Interpolation
from vitpar.data.transforms.policies import Policy
from vitpar.errors import RecipeError
from vitpar.limits import MAX_IMAGE_SIZE
from vitpar.text import either

Pixels = NDArray[np.int64]
"""Numbers of pixels, one an image, int64 [n]."""


def _check_size(size: int, interpolation: str) -> None:
    if size < 1:
        raise RecipeError(f"image size {size} is not a positive number of pixels")
    if interpolation not in PILLOW_KERNELS:
        raise RecipeError(f"unknown interpolation '{interpolation}': use {either(PILLOW_KERNELS)}")


@dataclass(frozen=True)
class TrainSettings:
    """Settings of `TrainTransform`.

    Raises RecipeError if one is out of its range.
    """

    size: int
    """Height and width of the result, in pixels."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Range of the crop's area as a fraction of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Range of the crop's width over height."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    interpolation: Interpolation = "bicubic"
    """Kernel that resizes the crop."""
    policy: Policy | None = None
    """Augmentation policy, as `parse_policy` returns it; None for no policy."""
    color_jitter: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Largest relative change of brightness, contrast and saturation."""
    erase: float = 0.0
    """Probability that noise replaces a box of 1/50 to 1/3 of the image's area."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of every channel, as in `Normalize`: the mean of the noise, and the fill colour of policy operations."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Standard deviation of every channel, as in `Normalize`, which the noise has too."""
    padding: int | None = None
    """Black pixels around the image before a random crop of `size`, which is not resized; None for a random-resized
    crop by `scale` and `ratio`."""

    def __post_init__(self) -> None:
        _check_size(self.size, self.interpolation)
        if self.padding is not None and not 0 <= self.padding < self.size:
            raise RecipeError(
                f"crop padding {self.padding} must be at least 0 and less than the image size {self.size}: larger "
                "padding allows crops without a pixel of the image"
            )
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise RecipeError(f"crop scale {self.scale} must be a range within (0, 1], such as (0.08, 1.0)")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise RecipeError(f"crop ratio {self.ratio} must be a range of positive numbers, such as (0.75, 1.33)")
        if not 0 <= self.flip <= 1:
            raise RecipeError(f"flip {self.flip} is not a probability: choose a number from 0 to 1")
        if not 0 <= self.erase <= 1:
            raise RecipeError(f"erase {self.erase} is not a probability: choose a number from 0 to 1")
        if min(self.color_jitter) < 0:
            raise RecipeError(f"color jitter {self.color_jitter} must not be negative: 0 leaves colours alone")

    @property
    def fill(self) -> tuple[int, int, int]:
        """Colour that policy operations move in from outside the image."""
        red, green, blue = (min(255, max(0, round(255 * mean))) for mean in self.mean)
        return red, green, blue

    def border(self, side: Pixels) -> Pixels:
        """Return the black pixels on each end of a side of images before a padded crop.

        A side that is too short with `padding` gets what it lacks once more on both ends, as in torchvision.
        """
        assert self.padding is not None, "crops are padded"
        return self.padding + np.maximum(0, self.size - side - 2 * self.padding)

    def central_crop(self, height: Pixels, width: Pixels) -> tuple[Pixels, Pixels, Pixels, Pixels]:
        """Return (top, left, height, width) of the largest central box of each image within the range of `ratio`."""
        h = np.minimum(height, np.maximum(1, np.rint(width / self.ratio[0]).astype(np.int64)))
        w = np.minimum(width, np.maximum(1, np.rint(height * self.ratio[1]).astype(np.int64)))
        return (height - h) // 2, (width - w) // 2, h, w


@dataclass(frozen=True)
class EvalSettings:
    """Settings of `EvalTransform`.

    Raises RecipeError if one is out of its range.
    """

    size: int
    """Height and width of the result, in pixels."""
    crop_pct: float = 0.875
    """Size of the crop as a fraction of the shorter side, above 0 and at most 1."""
    interpolation: Interpolation = "bicubic"
    """Kernel that resizes the image."""
    crop_mode: CropMode = "center"
    """How the image becomes square."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of every channel, as in `Normalize`, which is the colour of borders."""

    def __post_init__(self) -> None:
        _check_size(self.size, self.interpolation)
        if not 0 < self.crop_pct <= 1:
            raise RecipeError(f"crop_pct {self.crop_pct} is out of range: choose a number above 0 and at most 1")
        if self.size / self.crop_pct > MAX_IMAGE_SIZE:
            raise RecipeError(
                f"crop_pct {self.crop_pct} resizes images of {self.size} pixels to more than {MAX_IMAGE_SIZE:,} before "
                "the crop: choose a larger one"
            )


@dataclass(frozen=True)
class NormalizeSettings:
    """Settings of `Normalize`.

    Raises RecipeError for a standard deviation that is not positive.
    """

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Mean of each channel, for pixels in 0..1."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Standard deviation of each channel, for pixels in 0..1."""

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise RecipeError(f"std {self.std} must be positive in every channel")
