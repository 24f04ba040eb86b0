"""Transforms of one decoded image to uint8 of the model's size, for training and for evaluation.

Every random choice uses the sample's own stream of random numbers. Resizing uses torch's antialiased uint8 kernel,
which takes a third of the time of Pillow's. The two differ by one grey level in 0.3 % of a photograph's values, and by
two levels in one value of a million. For an image that is more than twice as tall as wide and shrinks, Pillow 13
resamples the columns first but torch always the rows. There they differ by up to 7 grey levels on photographs
(docs/differences.md).

Transforms run in many threads at once. torch resizes contiguous images in the calling thread, but its copies of more
than 32,768 values and its flip start a team of OpenMP threads for each thread that calls them. So numpy copies.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

from vitpar.data.randomness import Draws
from vitpar.data.transforms.names import Interpolation
from vitpar.data.transforms.settings import EvalSettings, TrainSettings
from vitpar.limits import MAX_DECODED_BYTES

_BY_TORCH = ("bicubic", "bilinear")
ERASED_SHARE = (0.02, 1 / 3)
"""Range of the erased fraction of the image's area (Zhong et al. 2020)."""
ERASED_RATIO = 0.3
"""Height over width of the erased box, from this to its inverse."""
TRIES = 10
"""Random boxes that are tried for a crop or an erased part."""


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


def _drawn(pixels: Tensor) -> Image.Image:
    """Return pixels, uint8 [3, height, width], as Pillow's image.

    Resizing returns one plane a channel. Pillow merges planes in a sixth of the time of reading interleaved channels.
    """
    if not pixels.is_contiguous():
        return Image.fromarray(pixels.permute(1, 2, 0).numpy())
    size = pixels.shape[2], pixels.shape[1]
    return Image.merge("RGB", [Image.frombuffer("L", size, plane, "raw", "L", 0, 1) for plane in pixels.numpy()])


@dataclass(frozen=True)
class TrainTransform(TrainSettings):
    """Random crop and horizontal flip, then optionally a policy, colour jitter and random erasing.

    Sources: Szegedy et al. 2015 and torchvision's RandomResizedCrop; with `padding` torchvision's RandomCrop with
    `pad_if_needed`; Zhong et al. 2020 for random erasing. Raises RecipeError if a setting is out of its range.
    """

    def __call__(self, image: NDArray[np.uint8], draws: Draws) -> Tensor:
        """Return the augmented image, uint8 [3, size, size].

        image: uint8 [height, width, 3].
        draws: random numbers of the sample.
        """
        if self.padding is None:
            top, left, height, width = self._crop(image.shape[0], image.shape[1], draws)
            pixels = resize(image[top : top + height, left : left + width], self.size, self.size, self.interpolation)
        else:
            pixels = self._padded_crop(image, draws)
        if draws.uniform() < self.flip:
            pixels = torch.from_numpy(pixels.numpy()[:, :, ::-1].copy())
        if self.policy or any(self.color_jitter):
            drawn = _drawn(pixels)
            drawn = self.policy(drawn, draws, self.fill) if self.policy else drawn
            pixels = torch.from_numpy(np.array(self._jittered(drawn, draws))).permute(2, 0, 1)
        if draws.uniform() < self.erase:
            pixels = self._erased(pixels, draws)
        return pixels

    def _crop(self, height: int, width: int, draws: Draws) -> tuple[int, int, int, int]:
        """Return (top, left, height, width) of the first of ten random boxes that fits.

        If none fits, the result is the largest central box within the range of `ratio`.
        """
        for _ in range(TRIES):
            area = height * width * draws.uniform(*self.scale)
            ratio = math.exp(draws.uniform(math.log(self.ratio[0]), math.log(self.ratio[1])))
            h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < h <= height and 0 < w <= width:
                return draws.below(height - h + 1), draws.below(width - w + 1), h, w
        return self.central_crop(height, width)

    def _padded_crop(self, image: NDArray[np.uint8], draws: Draws) -> Tensor:
        """Return a random crop of `image` with black borders, uint8 [3, size, size]."""
        starts = []
        for side in image.shape[:2]:
            border = self.border(side)
            starts.append(draws.below(side + 2 * border - self.size + 1) - border)
        top, left = starts
        inside = image[max(0, top) : top + self.size, max(0, left) : left + self.size].transpose(2, 0, 1)
        (above, before), (_, height, width) = (max(0, -top), max(0, -left)), inside.shape
        crop = np.zeros((3, self.size, self.size), np.uint8)
        crop[:, above : above + height, before : before + width] = inside
        return torch.from_numpy(crop)

    def _jittered(self, image: Image.Image, draws: Draws) -> Image.Image:
        """Change brightness, contrast and saturation, in a random order."""
        kinds = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
        steps = [(kind, amount) for kind, amount in zip(kinds, self.color_jitter, strict=True) if amount]
        while steps:
            kind, amount = steps.pop(draws.below(len(steps)))
            image = kind(image).enhance(draws.uniform(max(0.0, 1 - amount), 1 + amount))
        return image

    def _erased(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Replace the first of ten random boxes that fits by noise.

        After normalisation the noise is standard normal, except for rounding and clipping to 0..255.
        """
        for _ in range(TRIES):
            area = self.size**2 * draws.uniform(*ERASED_SHARE)
            ratio = math.exp(draws.uniform(math.log(ERASED_RATIO), -math.log(ERASED_RATIO)))
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h < self.size and 0 < w < self.size:
                top, left = draws.below(self.size - h + 1), draws.below(self.size - w + 1)
                erased = pixels.numpy().copy()
                levels, quantiles = noise_levels(self.mean, self.std), draws.bytes(3 * h * w).reshape(3, h, w)
                noise = np.stack([channel.take(drawn) for channel, drawn in zip(levels, quantiles, strict=True)])
                erased[:, top : top + h, left : left + w] = noise
                return torch.from_numpy(erased)
        return pixels


@cache
def noise_levels(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.uint8]:
    """Return a table from a uniform byte to a normally distributed grey level, uint8 [channels, 256].

    mean, std: of each channel, for pixels in 0..1.
    """
    channels = [NormalDist(255 * m, 255 * s) for m, s in zip(mean, std, strict=True)]
    levels = [[channel.inv_cdf((byte + 0.5) / 256) for byte in range(256)] for channel in channels]
    return np.array(levels).round().clip(0, 255).astype(np.uint8)


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
