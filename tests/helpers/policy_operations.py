"""Operations of augmentation policies on images, and the same ones by Pillow."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from vitpar.data.randomness import Draws
from vitpar.data.transforms.operations import CHANGES, arguments
from vitpar.data.transforms.policies import OPERATIONS
from vitpar.data.transforms.sample import TrainTransform

Array = NDArray[Any]


def drawn(name: str, levels: Any, keys: Array, side: int, increasing: bool = False) -> Array:
    """Return the argument of an operation for each key, at one level or at one for each."""
    levels = np.broadcast_to(np.asarray(levels, np.float64), len(keys))
    return np.broadcast_to(OPERATIONS[name].argument(levels, Draws(keys), increasing, side), len(keys))


def changed(name: str, images: Tensor, values: Array, mean: tuple[float, float, float]) -> Tensor:
    """Return images, uint8 [n, 3, side, side], changed by an operation with an argument for each."""
    change, rows = arguments(name, values, images.shape[-1])
    settings = TrainTransform(images.shape[-1], mean=mean)
    return CHANGES[change](settings, images, torch.from_numpy(np.ascontiguousarray(rows)).to(images.device))


def changed_image(
    name: str, image: Array, level: float, keys: Array, mean: tuple[float, float, float], increasing: bool = False
) -> Array:
    """Return what an operation at a level makes of an image, uint8 [side, side, 3], for each key."""
    images = torch.from_numpy(np.stack([image] * len(keys))).permute(0, 3, 1, 2).contiguous()
    values = drawn(name, level, keys, len(image), increasing)
    return changed(name, images, values, mean).permute(0, 2, 3, 1).numpy()


def by_pillow(name: str, image: Image.Image, value: Any, fill: tuple[int, int, int]) -> Array:
    """Return what Pillow makes of an image with the argument of an operation."""
    operation = OPERATIONS[name]
    if operation.matrix is not None:
        matrix, bilinear = operation.matrix(value, image.width), Image.Resampling.BILINEAR
        return np.asarray(image.transform(image.size, Image.Transform.AFFINE, matrix, bilinear, fillcolor=fill))
    if operation.table is not None:
        return np.asarray(image.point([*operation.table(value)] * 3))
    return np.asarray(_PILLOWS[name](image, value))


_PILLOWS: dict[str, Callable[[Image.Image, Any], Image.Image]] = {
    "AutoContrast": lambda image, _: ImageOps.autocontrast(image),
    "Equalize": lambda image, _: ImageOps.equalize(image),
    "Grayscale": lambda image, _: image.convert("L").convert("RGB"),
    "GaussianBlur": lambda image, sigma: image.filter(ImageFilter.GaussianBlur(sigma)),
    **{
        name: lambda image, factor, name=name: getattr(ImageEnhance, name)(image).enhance(factor)
        for name in ("Color", "Contrast", "Brightness", "Sharpness")
    },
}
