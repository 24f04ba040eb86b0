"""Augmentation policies, colour jitter, erasing, mixup and CutMix: correct pixels, and randomness fixed by the key.

Mixup and CutMix are compared with timm's code: boxes pixel for pixel, weights, blended and pasted pixels.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.distributions import assert_same_distribution
from helpers.oracles import timm
from vitpar.data.randomness import betas, sample_keys
from vitpar.data.transforms import batch as module
from vitpar.data.transforms.batch import Mix, Mixed
from vitpar.data.transforms.policies import RandAugment, parse_policy
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import RecipeError

pytestmark = pytest.mark.usefixtures("seeded")
timms = timm.data.mixup


def picture(size=32):
    """Return a uint8 image [size, size, 3] whose colours every operation changes."""
    y, x = np.mgrid[0:size, 0:size]
    ramps = np.stack([x, y, (x + y) / 2], -1) / (size - 1)
    return (30 + 170 * ramps + 20 * ((x // 4 + y // 4) % 2)[:, :, None]).astype(np.uint8)


def test_policies_parse_timms_names():
    assert parse_policy("rand-m9-n3-mstd0.5-inc1") == RandAugment(9, 3, 0.5, 0.5, True)
    assert parse_policy("rand") == RandAugment() and parse_policy("rand-p1") == RandAugment(probability=1.0)


@pytest.mark.parametrize(
    "text", ["", "random", "rand-m11", "rand-n1.5", "rand-x3", "rand-m9-m8", "rand-p2", "rand-inc2", "3a-m1"]
)
def test_unknown_policies_are_refused(text):
    with pytest.raises(RecipeError, match=f"unknown augmentation '{text}'"):
        parse_policy(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": parse_policy("rand-p1")},
        {"policy": parse_policy("original")},
        {"policy": parse_policy("cifar10")},
        {"padding": 4},
        {"policy": parse_policy("3a")},
        {"color_jitter": (0.4, 0.4, 0.4)},
        {"erase": 1.0},
    ],
)
def test_augmented_pixels_depend_only_on_the_key(settings):
    plain, transform = TrainTransform(32, scale=(1, 1)), TrainTransform(32, scale=(1, 1), **settings)
    pictures, keys = [picture(48)] * 12, np.arange(12)
    found = transform(pictures, keys)
    assert all(torch.equal(image, transform(pictures[:1], keys[i : i + 1])[0]) for i, image in enumerate(found))
    changed = (found != plain(pictures, keys)).flatten(1).any(1).sum()
    assert changed >= 8 and (found.dtype, tuple(found.shape)) == (torch.uint8, (12, 3, 32, 32))


def test_pixels_of_a_key_stay_the_same():
    """A run that resumes with a later version sees the pixels that it would have seen."""
    policy = parse_policy("rand-m9-n3-mstd0.5-inc1")
    transform = TrainTransform(32, padding=4, policy=policy, color_jitter=(0.4, 0.3, 0.2), erase=0.5)
    pixels = transform([picture(32)] * 40, np.arange(40) * 7919)
    assert hashlib.sha256(pixels.contiguous().numpy().tobytes()).hexdigest()[:16] == "968ccd7bdf42a4ce"


def keys_of(batch: int) -> NDArray[np.int64]:
    zeros = np.zeros(batch, np.int64)
    return sample_keys(0, zeros, np.arange(batch), zeros)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.5])
def test_mix_weight_depends_only_on_its_own_key(alpha):
    numbers = betas(keys_of(20_000), alpha, 3)
    assert abs(numbers.mean() - 0.5) < 0.015 and abs(numbers.var() - 0.25 / (2 * alpha + 1)) < 0.006
    assert np.array_equal(betas(keys_of(20_000)[500:600], alpha, 3), numbers[500:600])


@pytest.mark.parametrize("mix", [Mix(mixup=0.8), Mix(cutmix=1.0), Mix(0.8, 1.0), Mix(0.8, 1.0, 0.5, 0.5, apart=3)])
def test_images_and_labels_are_mixed_alike(mix):
    """Images are constant, so their mean shows the weight of each partner."""
    batch, size = 23, 32
    mixed = mix(keys_of(batch), size)
    assert np.array_equal(mixed.partners[mixed.partners], np.arange(batch))
    assert np.array_equal(mixed.weights, mixed.weights[mixed.partners])
    values = torch.arange(batch, dtype=torch.float64)
    images = mixed.images(values[:, None, None, None].expand(batch, 3, size, size), range(batch), batch)
    expected = mixed.weights * values.numpy() + (1 - mixed.weights) * mixed.partners
    assert np.allclose(images.mean((1, 2, 3)), expected, atol=1e-9)
    cut = mixed.boxes.any(1)
    assert all(len(image.unique()) <= 2 for image in images[cut]) and all(len(i.unique()) == 1 for i in images[~cut])
    labels = mixed.labels(torch.arange(batch), -1)
    assert np.allclose(labels[:, 0] * labels[:, 2] + labels[:, 1] * (1 - labels[:, 2]), expected)


def test_mixing_and_cutmix_have_the_requested_probabilities():
    mixed = Mix(0.8, 1.0, probability=0.7, switch=0.25)(keys_of(8000), 224)
    touched = mixed.weights < 1
    assert abs(touched.mean() - 0.7) < 0.03 and abs(mixed.boxes.any(1).sum() / touched.sum() - 0.25) < 0.03


def test_skipped_image_also_drops_its_partner():
    mixed = Mix(0.8)(keys_of(4), 8)
    assert mixed.labels(torch.tensor([5, -1, 3, 2]), -1)[:, :2].tolist() == [[-1, -1], [-1, -1], [3, 2], [2, 3]]


@pytest.mark.parametrize("rows", [[0, 1, 2], [5, 4, 3], [0, 2, 4], [1, 6]])
def test_mixing_part_of_a_batch_equals_mixing_all_of_it(rows):
    mix = Mix(0.8, 1.0, apart=2)
    mixed, images = mix(keys_of(7), 8), torch.rand(7, 3, 8, 8)
    needed = mix.needed(rows, 7)
    assert needed[: len(rows)] == rows and len(set(needed)) == len(needed)
    assert torch.equal(mixed.images(images[needed], needed, len(rows)), mixed.images(images, range(7), 7)[rows])


def drawing(patch: pytest.MonkeyPatch, cut: float, top: float, left: float, weight: float) -> None:
    """Make every pair draw these numbers; `cut` selects between mixup and CutMix."""
    numbers = {module._WHETHER: 0.0, module._WHICH: cut, module._TOP: top, module._LEFT: left}
    patch.setattr(module, "uniforms", lambda keys, which: np.full(len(keys), numbers[which]))
    patch.setattr(module, "betas", lambda keys, alpha, which: np.full(len(keys), weight))


@pytest.mark.parametrize("size", [7, 8, 32, 33, 224])
def test_cutmix_boxes_match_timm(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Centres lie along a diagonal and weights vary, so boxes are clipped at every edge.

    The weights count the clipped area.
    """
    centres = range(size) if size < 100 else range(0, size, 9)
    for weight in (0.0, 0.02, 0.11, 0.25, 0.5, 0.77, 0.9, 0.99, 0.9999, 1.0):
        for centre in centres:
            centre_x = (3 * centre + 5) % size
            drawing(monkeypatch, 0.0, (centre + 0.5) / size, (centre_x + 0.5) / size, weight)
            mixed = Mix(cutmix=1.0)(keys_of(2), size)
            drawn = iter((centre, centre_x))  # timm draws y, then x
            monkeypatch.setattr(timms.np.random, "randint", lambda low, high, size=None, drawn=drawn: next(drawn))
            (top, bottom, left, right), left_over = timms.cutmix_bbox_and_lam((3, size, size), weight)
            monkeypatch.undo()
            assert mixed.boxes.tolist() == [[top, left, bottom, right]] * 2
            assert mixed.weights == pytest.approx([left_over] * 2, abs=1e-12)


def test_box_and_weight_distributions_match_timm() -> None:
    size, pairs = 64, 8000
    mixed = Mix(cutmix=1.0)(keys_of(2 * pairs), size)
    theirs = [timms.cutmix_bbox_and_lam((3, size, size), np.random.beta(1.0, 1.0)) for _ in range(pairs)]
    boxes = np.array([(top, left, bottom, right) for (top, bottom, left, right), _ in theirs])
    for side, name in enumerate(("top", "left", "bottom", "right")):
        assert_same_distribution(mixed.boxes[::2, side], boxes[:, side], name)
    assert_same_distribution(mixed.weights[::2], [weight for _, weight in theirs], "weight")
    for alpha in (0.2, 0.8):
        weights = Mix(mixup=alpha)(keys_of(2 * pairs), size).weights[::2]
        assert_same_distribution(weights, np.random.beta(alpha, alpha, pairs), f"weight of mixup {alpha}")


@pytest.mark.parametrize("cut", [False, True], ids=["mixup", "cutmix"])
@pytest.mark.parametrize("weight", [0.13, 0.6, 1.0])
def test_mixed_images_and_targets_match_timm(cut: bool, weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm pairs the first image with the last, so a batch of two is one pair."""
    size, classes, smoothing = 12, 5, 0.1
    images = torch.randn(2, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([3, 1])
    drawing(monkeypatch, 0.0 if cut else 1.0, 2.5 / size, 9.5 / size, weight)
    mixed: Mixed = Mix(mixup=0.8, cutmix=1.0)(keys_of(2), size)
    rand: Callable[..., Any] = lambda count: np.full(count, 0.0 if cut else 0.99)  # noqa: E731
    monkeypatch.setattr(timms.np.random, "rand", rand)
    monkeypatch.setattr(timms.np.random, "beta", lambda a, b, size: np.full(size, weight))
    drawn = iter((2, 9))
    monkeypatch.setattr(timms.np.random, "randint", lambda low, high, size=None: next(drawn))
    mixing = timms.Mixup(0.8, 1.0, prob=1.0 + 1e-9, mode="pair", label_smoothing=smoothing, num_classes=classes)
    theirs, targets = mixing(images.clone(), labels)
    torch.testing.assert_close(mixed.images(images, range(2), 2), theirs, atol=1e-6, rtol=0)
    assert torch.equal(mixed.images(images, range(2), 2) == images, theirs == images) or not cut
    torch.testing.assert_close(targets_of(mixed.labels(labels, -1), classes, smoothing), targets, atol=1e-6, rtol=0)


def targets_of(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return class probabilities from rows of (label, other label, weight of the first)."""
    first, other, weight = labels.unbind(1)
    hot = [torch.nn.functional.one_hot(x.long(), classes).double() for x in (first, other)]
    return (1 - smoothing) * (weight[:, None] * hot[0] + (1 - weight[:, None]) * hot[1]) + smoothing / classes


def test_cutmix_pastes_only_the_pixels_of_the_box() -> None:
    """Every pixel has a unique value, which shows the image it comes from."""
    batch, size = 16, 24
    mixed = Mix(cutmix=1.0)(keys_of(batch), size)
    images = torch.arange(batch * size * size, dtype=torch.float64).view(batch, 1, size, size).expand(-1, 3, -1, -1)
    found = mixed.images(images, range(batch), batch)
    for row, (partner, (top, left, bottom, right)) in enumerate(zip(mixed.partners, mixed.boxes, strict=True)):
        expected = images[row].clone()
        expected[:, top:bottom, left:right] = images[partner][:, top:bottom, left:right]
        assert torch.equal(found[row], expected)
        assert mixed.weights[row] == pytest.approx(1 - (bottom - top) * (right - left) / size**2)
    assert (mixed.boxes[:, 2:] > mixed.boxes[:, :2]).all(1).sum() > batch / 2
