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
from vitpar.data.transforms import DEVICE_KERNELS, CropMode, Interpolation
from vitpar.data.transforms.drawn import DrawnBatch, Work, draw_changes, draw_crops
from vitpar.data.transforms.operations import fill_colour
from vitpar.data.transforms.policies import Policy
from vitpar.errors import RecipeError
from vitpar.limits import MAX_DECODED_BYTES, MAX_IMAGE_SIZE

Box = tuple[int, int, int, int, int]
"""Part of an image, as (top, left, height, width), and 1 if it is flipped, else 0."""


def resize(image: NDArray[np.uint8], height: int, width: int, interpolation: Interpolation) -> Tensor:
    """Resize uint8 [h, w, 3] to uint8 [3, height, width], without resampling if the size is already right.

    Kernels that torch lacks are Pillow's.
    """
    pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
    if image.shape[:2] == (height, width):
        return pixels
    if interpolation not in DEVICE_KERNELS:
        resized = Image.fromarray(image).resize((width, height), Image.Resampling[interpolation.upper()])
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    return F.interpolate(pixels[None], (height, width), mode=interpolation, antialias=True)[0]


@dataclass(frozen=True)
class TrainTransform:
    """Random crop and horizontal flip, then optionally a policy, colour jitter and random erasing.

    Crops are made one by one. What follows is done for many images at once, on any device (`DrawnBatch`).

    Raises RecipeError for a range of crops, a padding or a jitter of colours that is impossible.
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
        if self.padding is not None and not 0 <= self.padding < self.size:
            raise RecipeError(
                f"crop padding {self.padding} must be at least 0 and less than the image size {self.size}: larger "
                "padding allows crops without a pixel of the image"
            )
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise RecipeError(f"crop scale {self.scale} must be a range within (0, 1], such as (0.08, 1.0)")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise RecipeError(f"crop ratio {self.ratio} must be a range of positive numbers, such as (0.75, 1.33)")
        if min(self.color_jitter) < 0:
            raise RecipeError(f"color jitter {self.color_jitter} must not be negative: 0 leaves colours alone")

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
        return [*map(tuple, draw_crops(self, draws, *shapes.T).T.tolist())]

    def crop(self, image: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
        """Return the crop of an image, flipped or not, uint8 [3, size, size]."""
        top, left, height, width, flip = box
        if self.padding is None:
            part = image[top : top + height, left : left + width]
            pixels = resize(part, self.size, self.size, self.interpolation).numpy()
        else:  # black outside of the image
            inside = image[max(0, top) : top + self.size, max(0, left) : left + self.size].transpose(2, 0, 1)
            pixels = _pasted((0, 0, 0), (self.size, self.size), inside, max(0, -top), max(0, -left))
        return pixels[:, :, ::-1] if flip else pixels

    def work(self, draws: Draws) -> Work:
        """Return what to do with the crops, from the same random numbers."""
        return draw_changes(self, draws)

    def stored(self, samples: NDArray[np.int64], draws: Draws, height: int, width: int) -> Work:
        """Return how the crops of stored images of one size are made, by their numbers, int64 [n]."""
        sides = (np.full(len(samples), side) for side in (height, width))
        top, left, tall, wide, flips = draw_crops(self, draws, *sides)
        if self.padding is None:
            return [("resized crop", (samples, top, left, tall, wide, flips))]
        return [("padded crop", (samples, top, left, flips))]

    @property
    def changes(self) -> bool:
        """Whether anything follows the crop."""
        return bool(self.policy or any(self.color_jitter) or self.erase)


@dataclass(frozen=True)
class EvalTransform:
    """Resize to floor(size / crop_pct) pixels, then a central crop, with torchvision's rounding.

    `crop_mode` says what gets that size: the shorter side (center), both sides, whatever the image's ratio (squash), or
    the longer side, with borders around the image (border). They are timm's; transformers squashes for a `size` of
    height and width.

    An image that already has the model's size is enlarged and cropped too, unless `crop_pct` is 1. Of an image so long
    that it would exceed MAX_DECODED_BYTES after resizing, only the middle is resized: an image of 1 x 65,000 pixels
    would become gigabytes.

    Raises RecipeError for a `crop_pct` that enlarges images too much.
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

    changes = False

    def __post_init__(self) -> None:
        if self.size / self.crop_pct > MAX_IMAGE_SIZE:
            raise RecipeError(
                f"crop_pct {self.crop_pct} resizes images of {self.size} pixels to more than {MAX_IMAGE_SIZE:,} before "
                "the crop: choose a larger one"
            )

    def __call__(self, image: NDArray[np.uint8]) -> Tensor:
        """Return the resized and cropped image, uint8 [3, size, size]. image: uint8 [height, width, 3]."""
        height, width, _ = image.shape
        short = math.floor(self.size / self.crop_pct)
        longest = min(height, width) * max(2, MAX_DECODED_BYTES // (3 * short**2))
        if self.crop_mode == "center" and max(height, width) > longest:
            top, left = max(0, height - longest) // 2, max(0, width - longest) // 2
            image = image[top : top + longest, left : left + longest]
            height, width, _ = image.shape
        if self.crop_mode == "squash":
            sides = short, short
        elif self.crop_mode == "border":
            ratio = max(height, width) / short
            sides = max(1, round(height / ratio)), max(1, round(width / ratio))
        else:  # the longer side is rounded down, as torchvision does
            shorter = min(height, width)
            sides = short * height // shorter, short * width // shorter
        pixels = resize(image, *sides, self.interpolation)
        if self.crop_mode == "border":
            whole = [max(self.size, side) for side in sides]
            above, before = ((one - side) // 2 for one, side in zip(whole, sides, strict=True))
            pixels = torch.from_numpy(_pasted(fill_colour(self.mean), whole, pixels.numpy(), above, before))
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

    def stored(self, samples: NDArray[np.int64], draws: Draws, height: int, width: int) -> Work:
        """Return how images that are stored as this transform makes them are taken, by their numbers."""
        return [("take", (samples,))]


def _pasted(
    colour: Sequence[int], sides: Sequence[int], pixels: NDArray[np.uint8], top: int, left: int
) -> NDArray[np.uint8]:
    """Return an image of one colour, uint8 [3, *sides], with `pixels` of another image in it."""
    whole = np.empty((3, *sides), np.uint8)
    whole[:] = np.array(colour, np.uint8)[:, None, None]
    whole[:, top : top + pixels.shape[1], left : left + pixels.shape[2]] = pixels
    return whole
