"""Crops, resizing, erasing, colour jitter and normalisation compared with timm's and torchvision's code."""

from collections import Counter
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from helpers.distributions import assert_same_distribution
from helpers.oracles import timm, torchvision
from vitpar.data.randomness import Draws
from vitpar.data.transforms import CropMode, Interpolation
from vitpar.data.transforms.batch import Normalize
from vitpar.data.transforms.drawn import draw_changes, draw_crops
from vitpar.data.transforms.sample import EvalTransform, TrainTransform

pytestmark = pytest.mark.usefixtures("seeded")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
F = torchvision.transforms.functional


def noise(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def crops(transform: TrainTransform, shape: tuple[int, int], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return top, left, height and width of the crop for each key, int64 [n, 4]."""
    return draw_crops(transform, Draws(keys), *(np.full(len(keys), side) for side in shape))[:4].T


@pytest.mark.parametrize(
    ("shape", "settings", "count"),
    [
        ((1000, 1000), {}, 20_000),
        ((600, 900), {"scale": (0.3, 0.5), "ratio": (0.5, 4.0)}, 20_000),
        ((2000, 300), {}, 4000),  # few boxes fit, and sometimes none of the ten attempts
    ],
)
def test_crop_distribution_matches_torchvision(shape: tuple[int, int], settings: dict[str, Any], count: int) -> None:
    transform = TrainTransform(32, **settings)
    crop = torchvision.transforms.RandomResizedCrop(32, **settings)
    image = torch.empty(3, *shape)
    ours = crops(transform, shape, np.arange(count))
    theirs = np.array([crop.get_params(image, crop.scale, crop.ratio) for _ in range(count)])
    for boxes in (ours, theirs):
        assert boxes.min() >= 0 and (boxes[:, :2] + boxes[:, 2:] <= shape).all()
    found = [
        {
            "aspect ratio": np.log(boxes[:, 3] / boxes[:, 2]),
            "area": boxes[:, 2] * boxes[:, 3],
            "place from top": boxes[:, 0] / np.maximum(1, shape[0] - boxes[:, 2]),
            "place from left": boxes[:, 1] / np.maximum(1, shape[1] - boxes[:, 3]),
        }
        for boxes in (ours, theirs)
    ]
    for name in found[0]:
        assert_same_distribution(found[0][name], found[1][name], name)


@pytest.mark.parametrize("shape", [(20, 300), (300, 20), (1, 90), (90, 1), (37, 100), (100, 37), (40, 50)])
def test_fallback_crop_matches_torchvision(shape: tuple[int, int]) -> None:
    """Scale and ratio ask for nearly the complete image in a shape that it does not have, so all ten attempts fail."""
    ratio = (3 / 4, 4 / 3) if shape != (40, 50) else (0.5, 2.0)
    scale = (0.95, 1.0) if shape != (40, 50) else (1.0, 1.0)
    expected = torchvision.transforms.RandomResizedCrop.get_params(torch.empty(3, *shape), list(scale), list(ratio))
    transform = TrainTransform(8, scale=scale, ratio=ratio)
    assert crops(transform, shape, np.array([7])).tolist() == [list(expected)]


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((8, 8), 2), ((8, 8), 0), ((12, 10), 1), ((9, 30), 0), ((5, 7), 1), ((3, 20), 2), ((1, 1), 4), ((20, 2), 7)],
)
def test_padded_crops_match_torchvision(shape: tuple[int, int], padding: int) -> None:
    """Crops are equal, pixel by pixel, and occur equally often, also of images that are too small with padding."""
    image, transform = noise(*shape), TrainTransform(8, flip=0, padding=padding)
    crop = torchvision.transforms.RandomCrop(8, padding=padding, pad_if_needed=True)
    expected, draws = Counter(crop(Image.fromarray(image)).tobytes() for _ in range(20_000)), 20_000
    ours = transform([image] * draws, np.arange(draws)).permute(0, 2, 3, 1).numpy()
    found = Counter(crop.tobytes() for crop in ours)
    assert found.keys() == expected.keys()
    assert all(abs(found[one] - expected[one]) < 5 * (2 * expected[one]) ** 0.5 for one in expected)


def evaluated_by_timm(
    image: NDArray[np.uint8], size: int, crop_pct: float, interpolation: str, crop_mode: str = "center"
) -> NDArray[np.int64]:
    modes = {"crop_pct": crop_pct, "crop_mode": crop_mode, "interpolation": interpolation}
    transform = timm.data.transforms_factory.transforms_imagenet_eval(size, mean=MEAN, normalize=False, **modes)
    return transform(Image.fromarray(image)).numpy().astype(np.int64)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize(
    ("shape", "size"),
    [
        *(((8, 8), 8), ((32, 32), 32), ((224, 224), 224), ((375, 500), 224), ((500, 333), 224), ((61, 100), 32)),
        *(((33, 32), 32), ((32, 33), 32), ((10, 13), 28), ((1, 1), 8), ((299, 401), 97)),
    ],
)
def test_eval_transform_matches_timm_on_noise(
    shape: tuple[int, int], size: int, crop_pct: float, interpolation: Any
) -> None:
    """On noise, a crop that is off by one pixel differs everywhere."""
    image = noise(*shape)
    expected = evaluated_by_timm(image, size, crop_pct, interpolation)
    found = EvalTransform(size, crop_pct, interpolation)(image).numpy()
    assert found.shape == expected.shape == (3, size, size)
    difference = np.abs(found - expected)
    assert difference.max() <= 2 and (difference > 1).mean() < 0.001
    if shape == (size, size) and crop_pct == 1.0:
        assert np.array_equal(found, image.transpose(2, 0, 1))


@pytest.mark.parametrize("crop_mode", get_args(CropMode))
@pytest.mark.parametrize("interpolation", [*get_args(Interpolation)])
@pytest.mark.parametrize(
    ("shape", "size", "crop_pct"), [((375, 500), 224, 0.875), ((61, 20), 32, 1.0), ((33, 90), 32, 0.9)]
)
def test_crop_modes_and_kernels_match_timm(
    shape: tuple[int, int], size: int, crop_pct: float, interpolation: Any, crop_mode: Any
) -> None:
    image = noise(*shape)
    expected = evaluated_by_timm(image, size, crop_pct, interpolation, crop_mode)
    found = EvalTransform(size, crop_pct, interpolation, crop_mode, MEAN)(image).numpy()
    assert found.shape == expected.shape == (3, size, size)
    # torch and Pillow resample narrow images in another order.
    difference = np.abs(found - expected)
    assert difference.max() <= (2 if shape[0] < 2 * shape[1] else 12) and (difference > 2).mean() < 0.03


@pytest.mark.parametrize(("size", "crop_pct"), [(224, 0.875), (384, 1.0), (64, 0.95)])
def test_eval_transform_matches_timm_on_photographs(size: int, crop_pct: float) -> None:
    for photograph in load_sample_images().images:
        for image in (photograph, photograph[:, :300].copy()):
            expected = evaluated_by_timm(image, size, crop_pct, "bicubic")
            difference = np.abs(EvalTransform(size, crop_pct)(image.copy()).numpy() - expected)
            assert difference.max() <= 2 and (difference > 0).mean() < 0.02 and (difference > 1).mean() < 1e-4


def test_normalisation_matches_torchvision() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    expected = torchvision.transforms.Normalize(MEAN, STD)(F.convert_image_dtype(images, torch.float32))
    torch.testing.assert_close(Normalize(MEAN, STD)(images), expected, atol=2e-6, rtol=0)
    assert Normalize(MEAN, STD)(images, torch.bfloat16).dtype == torch.bfloat16


def erased(pixels: torch.Tensor, untouched: float) -> tuple[int, int, int, int, NDArray[Any]] | None:
    """Return top, left, height, width and values of the pixels that are not `untouched`, or None."""
    changed = (pixels != untouched).any(0)
    if not changed.any():
        return None
    (top, bottom), (left, right) = ((x.min().item(), x.max().item() + 1) for x in changed.nonzero().T)
    return top, left, bottom - top, right - left, pixels[:, top:bottom, left:right].numpy()


def test_random_erasing_distribution_matches_timm() -> None:
    """Compare the boxes, their frequency and their normalised content.

    timm erases after normalisation, vitpar before.
    """
    size, draws = 48, 6000
    transform = TrainTransform(size, scale=(1, 1), ratio=(1, 1), flip=0, erase=0.5, mean=MEAN, std=STD)
    image = np.full((size, size, 3), 1, np.uint8)
    ours = [erased(pixels, 1) for pixels in transform([image] * draws, np.arange(draws))]
    erasing = timm.data.random_erasing.RandomErasing(0.5, mode="pixel", device="cpu")
    theirs = [erased(erasing(torch.zeros(3, size, size)), 0) for _ in range(draws)]
    often = [np.mean([box is not None for box in boxes]) for boxes in (ours, theirs)]
    assert abs(often[0] - 0.5) < 0.03 and abs(often[1] - 0.5) < 0.03
    boxes = [np.array([box[:4] for box in side if box is not None]) for side in (ours, theirs)]
    kinds = {
        "height": lambda box: box[:, 2],
        "width": lambda box: box[:, 3],
        "place from top": lambda box: box[:, 0] / (size - box[:, 2]),
        "place from left": lambda box: box[:, 1] / (size - box[:, 3]),
    }
    for name, kind in kinds.items():
        assert_same_distribution(kind(boxes[0]), kind(boxes[1]), name)
    values = [np.concatenate([box[4].reshape(3, -1) for box in side[:150] if box], axis=1) for side in (ours, theirs)]
    for channel in range(3):
        mean, std = 255 * MEAN[channel], 255 * STD[channel]
        levels = (mean + std * values[1][channel]).round().clip(0, 255)
        assert_same_distribution(values[0][channel][:10_000], levels[:10_000], f"noise of channel {channel}")
        correlation = np.corrcoef(values[0][channel][:-1], values[0][channel][1:])[0, 1]
        assert abs(correlation) < 0.03, "neighbouring values follow from each other"


@pytest.mark.parametrize("amounts", [(0.4, 0.4, 0.4), (0.3, 0.0, 0.8), (1.5, 0.2, 0.1)])
def test_colour_jitter_matches_torchvision(amounts: tuple[float, float, float]) -> None:
    """Apply torchvision's operations in the drawn order with the drawn factors. Ranges match, and all orders occur."""
    image = np.ascontiguousarray(load_sample_images().images[1][:384:8, :384:8])
    jitter = torchvision.transforms.ColorJitter(*amounts)
    kinds = {
        name: (adjust, bounds)
        for name, adjust, bounds in (
            ("Brightness", F.adjust_brightness, jitter.brightness),
            ("Contrast", F.adjust_contrast, jitter.contrast),
            ("Color", F.adjust_saturation, jitter.saturation),
        )
        if bounds is not None
    }
    count = 300
    transform = TrainTransform(len(image), scale=(1, 1), ratio=(1, 1), flip=0, color_jitter=amounts)
    draws = Draws(np.arange(count))
    draw_crops(transform, draws, *(np.full(count, len(image)),) * 2)
    made: list[list[tuple[str, float]]] = [[] for _ in range(count)]
    for name, (rows, factors) in draw_changes(transform, draws):
        for row, factor in zip(rows.tolist(), factors.tolist(), strict=True):
            made[row].append((name, factor))
    for name, (_, (low, high)) in kinds.items():
        factors = [factor for one in made for kind, factor in one if kind == name]
        near = 0.05 * (high - low)
        assert low <= min(factors) < low + near and high - near < max(factors) <= high and len(factors) == count
    for found, changes in zip(transform([image] * count, np.arange(count)), made, strict=True):
        expected = Image.fromarray(image)
        for name, factor in changes:
            expected = kinds[name][0](expected, factor)
        assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(expected))
    orders = Counter(tuple(name for name, _ in changes) for changes in made)
    assert len(orders) == {3: 6, 2: 2}[len(kinds)]
    assert min(orders.values()) > 0.5 * count / len(orders)
