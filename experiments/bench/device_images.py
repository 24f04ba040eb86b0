"""Small images in the memory of a device, augmented there: crop, flip, shape, colour, cutout, mixing.

All functions take and return images as floats from 0 to 1, [batch, channels, height, width], and draw on their device.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vitpar.data.images import decode
from vitpar.data.sources import open_source

PAD = 4
"""Pixels that a crop may shift an image."""
SHAPES = ("identity", "rotate", "shear_x", "shear_y", "translate_x", "translate_y")
COLOURS = ("identity", "brightness", "contrast", "saturation", "solarize", "posterize")
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey."""
FILLED = 0.47
"""Value of the pixels that cutout erases: about the mean of CIFAR-10."""
CUT = 4
"""Half the side of cutout's square, in pixels."""


@dataclass(frozen=True)
class Split:
    """Images of one split, uint8 [count, channels, height, width], and their labels [count], on one device."""

    images: Tensor
    labels: Tensor


def load(location: Path, device: torch.device, most: int | None = None) -> dict[str, Split]:
    """Decode a source of equally large images, of any kind that ``vitpar data pack`` reads; return its splits.

    most: images of a split, evenly spaced; None for all.
    """
    found = {}
    for name, split in open_source(location).splits.items():
        chosen = np.arange(0, len(split.labels), 1 if most is None else max(1, len(split.labels) // most))
        with ThreadPoolExecutor() as pool:
            pixels = np.stack(list(pool.map(lambda i, read=split.read: decode(read(int(i))), chosen)))
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device)
        found[name] = Split(images, torch.from_numpy(split.labels[chosen].astype(np.int64)).to(device))
    return found


def augment(x: Tensor, g: Generator) -> Tensor:
    """Return the images randomly cropped, flipped, changed in shape and colour, with a square cut out."""
    return _cut_out(_change_colour(_change_shape(x, g), g), g)


def _change_shape(x: Tensor, g: Generator) -> Tensor:
    """Sample each image once through an affine map: flip, padded crop, and one of SHAPES."""
    batch, side = len(x), x.shape[-1]
    flip = _sign(x, g)
    operation, amount = _choice(x, g, len(SHAPES)), _uniform(x, g) * _sign(x, g)

    def of(name: str, most: float) -> Tensor:
        return torch.where(operation == SHAPES.index(name), amount * most, torch.zeros_like(amount))

    angle, shear_x, shear_y = of("rotate", math.pi / 6), of("shear_x", 0.3), of("shear_y", 0.3)
    # In units of half an image, as affine_grid takes them.
    crop = [((_uniform(x, g) * (2 * PAD + 1)).floor() - PAD) * 2 / side for _ in range(2)]
    shift_x, shift_y = of("translate_x", 0.45) + crop[0], of("translate_y", 0.45) + crop[1]
    cos, sin = angle.cos(), angle.sin()
    rows = (
        torch.stack([flip * (cos + shear_x * sin), -sin + shear_x * cos, shift_x], 1),
        torch.stack([flip * (sin + shear_y * cos), cos - shear_y * sin, shift_y], 1),
    )
    grid = F.affine_grid(torch.stack(rows, 1), [batch, *x.shape[1:]], align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _change_colour(x: Tensor, g: Generator) -> Tensor:
    operation = _choice(x, g, len(COLOURS))[:, None, None, None]
    factor = (1 + 0.9 * (2 * _uniform(x, g) - 1))[:, None, None, None]
    threshold = (0.3 + 0.7 * _uniform(x, g))[:, None, None, None]
    # Without a tensor of the weights, whose transfer would wait for the device.
    red, green, blue = (weight * x[:, n : n + 1] for n, weight in enumerate(GREY))
    grey = red + green + blue
    mean = grey.mean((2, 3), keepdim=True)
    changed = {
        "brightness": x * factor,
        "contrast": (x - mean) * factor + mean,
        "saturation": (x - grey) * factor + grey,
        "solarize": torch.where(x > threshold, 1 - x, x),
        "posterize": (x * 16).floor() / 16,
    }
    for name, value in changed.items():
        x = torch.where(operation == COLOURS.index(name), value, x)
    return x.clamp(0, 1)


def _cut_out(x: Tensor, g: Generator) -> Tensor:
    side = x.shape[-1]
    places = torch.arange(side, device=x.device)
    hit = [((places - _uniform(x, g)[:, None] * side).abs() < CUT) for _ in range(2)]
    return torch.where((hit[0][:, :, None] & hit[1][:, None, :])[:, None], FILLED, x)


def mix(x: Tensor, labels: Tensor, host: np.random.Generator, g: Generator) -> tuple[Tensor, Tensor]:
    """Mix the batch with a permutation of itself by mixup or CutMix, evenly.

    Return images, and mixed labels as ``ParallelModel.forward_backward`` takes them: float64 [batch, 3] of own label,
    other label, share of the own one. host: draws what the batch shares, so that nothing waits for the device.
    """
    order = torch.randperm(len(x), device=x.device, generator=g)
    side = x.shape[-1]
    if host.random() < 0.5:
        share = host.beta(0.8, 0.8)
        x = torch.lerp(x[order], x, share)
    else:
        cut = int(side * math.sqrt(1 - host.beta(1.0, 1.0)))
        top, left = host.integers(0, side - cut + 1, 2)
        region = (..., slice(top, top + cut), slice(left, left + cut))
        x, other = x.clone(), x[order]
        x[region] = other[region]
        share = 1 - (cut / side) ** 2
    shares = torch.full_like(labels, share, dtype=torch.float64)
    return x, torch.stack([labels.double(), labels[order].double(), shares], 1)


def _uniform(x: Tensor, g: Generator) -> Tensor:
    """Return a number from 0 to 1 for each image."""
    return torch.rand(len(x), device=x.device, generator=g)


def _sign(x: Tensor, g: Generator) -> Tensor:
    return (_uniform(x, g) < 0.5) * 2.0 - 1.0


def _choice(x: Tensor, g: Generator, among: int) -> Tensor:
    return (_uniform(x, g) * among).long()
