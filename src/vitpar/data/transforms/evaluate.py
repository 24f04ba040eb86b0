"""How validation images become of the model's size."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.transforms.resize import Interpolation, check_size, resize
from vitpar.errors import RecipeError
from vitpar.limits import MAX_DECODED_BYTES, MAX_IMAGE_SIZE


@dataclass(frozen=True)
class EvalTransform:
    """Resize the shorter side to size / crop_pct, then cut out the centre; an image of the right size is left alone.

    Of an image so long that it would have more than MAX_DECODED_BYTES then, only the middle is resized: 1 x 65,000
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
        if height == width == self.size:
            return torch.from_numpy(image).permute(2, 0, 1)
        short = math.floor(self.size / self.crop_pct)
        longest = min(height, width) * max(2, MAX_DECODED_BYTES // (3 * short**2))
        if max(height, width) > longest:
            top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
            image = image[top : top + longest, left : left + longest]
            height, width, _ = image.shape
        scale = short / min(height, width)
        tall, wide = max(short, int(height * scale)), max(short, int(width * scale))
        pixels = resize(image, tall, wide, self.interpolation)
        top, left = round((tall - self.size) / 2), round((wide - self.size) / 2)
        return pixels[:, top : top + self.size, left : left + self.size]
