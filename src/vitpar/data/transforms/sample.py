"""Transforms of decoded images to uint8 of the model's size, for training and for evaluation.

Resizing uses torch's antialiased uint8 kernel, which takes a third of the time of Pillow's. The two differ by one grey
level in 0.3 % of a photograph's values, and by two levels in one value of a million. For an image that is more than
twice as tall as wide and shrinks, Pillow 13 resamples the columns first but torch always the rows. There they differ by
up to 7 grey levels on photographs (docs/differences.md).

Evaluation may run in a program's own threads. torch resizes contiguous images in the calling thread, but its copies of
more than 32,768 values start a team of OpenMP threads for each thread that calls them. So numpy copies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitpar.data.randomness import Draws
from vitpar.data.transforms.choices import draw_changes, draw_crops
from vitpar.data.transforms.drawn import DrawnBatch, Work, crops_of, work_of
from vitpar.data.transforms.names import Interpolation
from vitpar.data.transforms.settings import EvalSettings, TrainSettings
from vitpar.limits import MAX_DECODED_BYTES

_BY_TORCH = ("bicubic", "bilinear")
Box = tuple[int, int, int, int, int]
"""Part of an image, as (top, left, height, width), and 1 if it is flipped, else 0."""


def resize(image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation) -> Tensor:
    """Resize uint8 [h, w, 3] to uint8 [3, height, width], without resampling if the size is already right.

    Kernels that torch lacks are Pillow's.
    """
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if image.shape[:2] == (height, width):
        return pixels
    if interpolation not in _BY_TORCH:
        resized = Image.fromarray(image).resize((width, height), Image.Resampling[interpolation.upper()])
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    return F.interpolate(pixels[None], (height, width), mode=interpolation, antialias=True)[0]


@dataclass(frozen=True)
class TrainTransform(TrainSettings):
    """Random crop and horizontal flip, then optionally a policy, colour jitter and random erasing.

    Crops are made one by one. What follows is done for many images at once, on any device (`DrawnBatch`).

    Raises RecipeError if a setting is out of its range.
    """

    def __call__(self, images: Sequence[NDArray[np.uint8]], keys: NDArray[np.int64]) -> Tensor:
        """Return augmented images, uint8 [n, 3, size, size].

        images: n images, uint8 [height, width, 3], of any sizes.
        keys: random keys of the samples, int64 [n].
        """
        draws, shapes = Draws(keys), np.array([image.shape[:2] for image in images])
        boxes = self.boxes(draws, shapes)
        crops = torch.from_numpy(np.stack([self.crop(*pair) for pair in zip(images, boxes, strict=True)]))
        work = self.work(draws)
        return DrawnBatch(crops, work, self).made() if work else crops

    def boxes(self, draws: Draws, shapes: NDArray[np.int64]) -> list[Box]:
        """Return the part of each image that is cropped.

        draws: random numbers of these images.
        shapes: heights and widths, int64 [n, 2].
        """
        drawn = draw_crops(self, draws, *shapes.T)
        return [*map(tuple, np.stack([*vars(drawn).values()], 1).tolist())]

    def crop(self, image: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
        """Return the crop of an image, flipped or not, uint8 [3, size, size]."""
        top, left, height, width, flip = box
        if self.padding is None:
            part = image[top : top + height, left : left + width]
            pixels = resize(part, self.size, self.size, self.interpolation).numpy()
        else:
            pixels = self._padded(image, top, left)
        return pixels[:, :, ::-1] if flip else pixels

    def work(self, draws: Draws) -> Work:
        """Return what to do with the crops, from the same random numbers."""
        return work_of(self, draw_changes(self, draws))

    def stored(self, samples: NDArray[np.int64], draws: Draws, height: int, width: int) -> Work:
        """Return how the crops of stored images of one size are made, by their numbers, int64 [n]."""
        sides = (np.full(len(samples), side) for side in (height, width))
        return crops_of(self, samples, draw_crops(self, draws, *sides))

    @property
    def changes(self) -> bool:
        """Whether anything follows the crop."""
        return bool(self.policy or any(self.color_jitter) or self.erase)

    def _padded(self, image: NDArray[np.uint8], top: int, left: int) -> NDArray[np.uint8]:
        """Return the part of an image from `top` and `left` on, uint8 [3, size, size], black outside of the image."""
        inside = image[max(0, top) : top + self.size, max(0, left) : left + self.size].transpose(2, 0, 1)
        (above, before), (_, height, width) = (max(0, -top), max(0, -left)), inside.shape
        crop = np.zeros((3, self.size, self.size), np.uint8)
        crop[:, above : above + height, before : before + width] = inside
        return crop


@dataclass(frozen=True)
class EvalTransform(EvalSettings):
    """Resize to floor(size / crop_pct) pixels, then a central crop, with torchvision's rounding.

    `crop_mode` says what gets that size: the shorter side (center), both sides, whatever the image's ratio (squash), or
    the longer side, with borders around the image (border). They are timm's; transformers squashes for a `size` of
    height and width.

    An image that already has the model's size is enlarged and cropped too, unless `crop_pct` is 1. Of an image so long
    that it would exceed MAX_DECODED_BYTES after resizing, only the middle is resized: an image of 1 x 65,000 pixels
    would become gigabytes.

    Raises RecipeError when a setting is out of its range.
    """

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """Return the resized and cropped image, uint8 [3, size, size].

        image: uint8 [height, width, 3].
        """
        height, width, _ = image.shape
        short = math.floor(self.size / self.crop_pct)
        longest = min(height, width) * max(2, MAX_DECODED_BYTES // (3 * short**2))
        if self.crop_mode == "center" and max(height, width) > longest:
            top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
            image = image[top : top + longest, left : left + longest]
            height, width, _ = image.shape
        pixels = resize(image, *self._resized(height, width, short), self.interpolation)
        if self.crop_mode == "border":
            pixels = self._with_borders(pixels)
        # Python's `round` rounds halves to even numbers, as torchvision does.
        top, left = (round((side - self.size) / 2) for side in pixels.shape[1:])
        return pixels[:, top : top + self.size, left : left + self.size]

    def boxes(self, draws: Draws, shapes: NDArray[np.int64]) -> list[Box]:
        """Return a part for each image that stands for all of it. Draws nothing."""
        return [(0, 0, height, width, 0) for height, width in shapes.tolist()]

    def crop(self, image: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
        """Return the image, transformed."""
        return self(image).numpy()

    def work(self, draws: Draws) -> Work:
        """Return nothing: images are complete after `crop`."""
        return []

    changes = False

    def stored(self, samples: NDArray[np.int64], draws: Draws, height: int, width: int) -> Work:
        """Return how images that are stored as this transform makes them are taken, by their numbers."""
        return [("take", (samples,))]

    def _resized(self, height: int, width: int, target: int) -> tuple[int, int]:
        """Return the height and width before the crop of an image of `height` and `width`."""
        if self.crop_mode == "squash":
            return target, target
        if self.crop_mode == "border":
            ratio = max(height, width) / target
            return max(1, round(height / ratio)), max(1, round(width / ratio))
        # The longer side is rounded down, as torchvision does.
        shorter = min(height, width)
        return target * height // shorter, target * width // shorter

    def _with_borders(self, pixels: Tensor) -> Tensor:
        """Return the image, uint8 [3, height, width], with borders so that no side is shorter than the result."""
        missing = [max(0, self.size - side) for side in pixels.shape[1:]]
        if not any(missing):
            return pixels
        colour = np.array([min(255, max(0, round(255 * mean))) for mean in self.mean], np.uint8)
        height, width = (side + more for side, more in zip(pixels.shape[1:], missing, strict=True))
        whole = np.broadcast_to(colour[:, None, None], (3, height, width)).copy()
        top, left = (more // 2 for more in missing)
        whole[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels.numpy()
        return torch.from_numpy(whole)
