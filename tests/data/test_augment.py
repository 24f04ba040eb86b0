"""Augmentation policies, colour jitter, erasing, mixup and CutMix: correct pixels, and randomness fixed by the key."""

import hashlib

import numpy as np
import pytest
import torch

from vitpar.data.randomness import betas, sample_keys
from vitpar.data.transforms.batch import Mix
from vitpar.data.transforms.policies import RandAugment, parse_policy
from vitpar.data.transforms.sample import TrainTransform
from vitpar.errors import RecipeError


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


def keys_of(batch):
    zeros = np.zeros(batch, int)
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
