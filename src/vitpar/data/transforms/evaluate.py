"""Resize and crop of validation images, as timm and torchvision do them."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.transforms.resize import Interpolation, check_size, resize
from vitpar.errors import RecipeError
from vitpar.limits import MAX_DECODED_BYTES, MAX_IMAGE_SIZE


@dataclass(frozen=True)
class EvalTransform:
    """Resize the shorter side to floor(size / crop_pct) pixels, then crop the centre, with torchvision's rounding.

    An image that already has the model's size is enlarged and cropped too, unless crop_pct is 1, which leaves it as it
    is. Of an image so long that it would take more than MAX_DECODED_BYTES then, only the middle is resized: 1 x 65,000
    pixels would become gigabytes.

    Raises RecipeError when a setting is out of its range.
    """

    size: int
    crop_pct: float = 0.875
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        check_size(self.size, self.interpolation)
        if not 0 < self.crop_pct <= 1:
            raise RecipeError(f"crop_pct {self.crop_pct} is out of range: choose a number above 0 and at most 1")
        if self.size / self.crop_pct > MAX_IMAGE_SIZE:
            raise RecipeError(
                f"crop_pct {self.crop_pct} makes images of {self.size} pixels larger than {MAX_IMAGE_SIZE:,} before "
                "they are cropped: choose a larger one"
            )

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """image: uint8 [height, width, 3]. Returns uint8 [3, size, size]."""
        height, width, _ = image.shape
        short = math.floor(self.size / self.crop_pct)
        longest = min(height, width) * max(2, MAX_DECODED_BYTES // (3 * short**2))
        if max(height, width) > longest:
            top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
            image = image[top : top + longest, left : left + longest]
            height, width, _ = image.shape
        # The longer side is rounded down, and Python's round takes halves to even numbers: both as torchvision does.
        tall, wide = (short * side // min(height, width) for side in (height, width))
        pixels = resize(image, tall, wide, self.interpolation)
        top, left = round((tall - self.size) / 2), round((wide - self.size) / 2)
        return pixels[:, top : top + self.size, left : left + self.size]
