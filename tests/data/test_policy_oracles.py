"""Operations and policies of RandAugment, AutoAugment and 3-Augment compared with timm's and torchvision's code."""

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_sample_images

from helpers.distributions import assert_same_distribution
from helpers.oracles import timm, torchvision
from helpers.policy_operations import changed_image, drawn
from vitpar.data.randomness import Draws
from vitpar.data.transforms import policies
from vitpar.data.transforms.policies import OPERATIONS, Operation, parse_policy

pytestmark = pytest.mark.usefixtures("seeded")
timms = timm.data.auto_augment
FILL, MEAN = (124, 116, 104), (0.485, 0.456, 0.406)
BILINEAR = Image.Resampling.BILINEAR
HPARAMS = {"img_mean": FILL, "interpolation": BILINEAR, "translate_pct": 0.45}
PHOTOGRAPH = Image.fromarray(np.ascontiguousarray(load_sample_images().images[0][100:148, 200:248]))
INCREASING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")
RANDOM = ("GaussianBlur",)  # its radius is random


def timms_name(name: str, increasing: bool = False) -> str:
    renamed = {"TranslateX": "TranslateXRel", "TranslateY": "TranslateYRel", "Grayscale": "Desaturate"}
    return renamed.get(name, f"{name}Increasing" if increasing and name in INCREASING else name)


def by_timm(name: str, level: float, increasing: bool, negative: bool, patch: pytest.MonkeyPatch) -> NDArray[np.uint8]:
    """Return timm's result for the photograph, with the given sign if timm draws one."""
    patch.setattr(timms.random, "random", lambda: 0.9 if negative else 0.1)
    if "Posterize" in name and timms.LEVEL_TO_ARG[timms_name(name, increasing)](level, HPARAMS) == (0,):
        return np.zeros_like(np.asarray(PHOTOGRAPH))  # zero bits: Pillow 13 no longer accepts that from timm
    operation = timms.AugmentOp(timms_name(name, increasing), prob=1.0, magnitude=level, hparams=HPARAMS)
    return np.asarray(operation(PHOTOGRAPH))


CASES = [(name, increasing) for name in OPERATIONS for increasing in (False, True) if name not in RANDOM]
CASES.remove(("PosterizeOriginal", True))  # timm's is the same as without increasing levels


@pytest.mark.parametrize(("name", "increasing"), CASES)
def test_operations_match_timm(name: str, increasing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels are equal at every level and for both signs."""
    levels = [10.0] if name == "Grayscale" else [*range(11), 0.3, 2.5, 4.49, 7.77, 9.99]
    for level in levels:
        seen = set()
        expected = [by_timm(name, level, increasing, negative, monkeypatch) for negative in (False, True)]
        for found in changed_image(name, np.asarray(PHOTOGRAPH), level, np.arange(8), MEAN, increasing):
            same = [np.array_equal(found, other) for other in expected]
            assert any(same), f"level {level}"
            seen.add(same.index(True))
        assert np.array_equal(*expected) or seen == {0, 1}, "only one sign is ever drawn"


def test_blur_radii_match_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with the radii that Pillow receives."""
    theirs: list[float] = []
    monkeypatch.setattr(timms.ImageFilter, "GaussianBlur", lambda radius: theirs.append(radius))
    monkeypatch.setattr(Image.Image, "filter", lambda image, _: image)
    operation = timms.AugmentOp("GaussianBlurRand", prob=1.0, magnitude=10, hparams=HPARAMS)
    for _ in range(3000):
        operation(PHOTOGRAPH)
    assert_same_distribution(drawn("GaussianBlur", 0, np.arange(3000), 48), theirs)


@pytest.mark.parametrize("name", ["original", "3a"])
def test_policy_tables_match_timm(name: str) -> None:
    renamed = {"GaussianBlur": "GaussianBlurRand"}
    policy = parse_policy(name)
    assert isinstance(policy, policies.OneOf) and not policy.increasing
    ours = [[(renamed.get(op, timms_name(op)), p) for op, p, _ in line] for line in policy.lines]
    theirs = [[(op.name, op.prob) for op in line] for line in timms.auto_augment_policy(name, HPARAMS)]
    assert sorted(ours) == sorted(theirs)
    if name == "original":  # other levels are unused, or timm's highest
        levels = [[level for _, _, level in line] for line in policy.lines]
        assert levels == [[op.magnitude for op in line] for line in timms.auto_augment_policy(name, HPARAMS)]
    else:
        assert next(line for line in policy.lines if line[0][0] == "Solarize")[0][2] == 5


AFFINE = {"ShearX": (1, 0.3), "ShearY": (3, 0.3), "TranslateX": (2, 0.45), "TranslateY": (5, 0.45)}
"""Place in Pillow's affine matrix and largest value. torchvision moves by 150/331 of the size, in whole pixels."""


def by_pillow(place: int, value: float) -> NDArray[np.uint8]:
    matrix = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    matrix[place] = value
    size, affine = PHOTOGRAPH.size, Image.Transform.AFFINE
    return np.asarray(PHOTOGRAPH.transform(size, affine, matrix, BILINEAR, fillcolor=FILL))


def by_torchvision(name: str, magnitude: float) -> NDArray[np.uint8]:
    bilinear, fill = torchvision.transforms.InterpolationMode.BILINEAR, list(FILL)
    apply = torchvision.transforms.autoaugment._apply_op
    return np.asarray(apply(PHOTOGRAPH, name, magnitude, interpolation=bilinear, fill=fill))


@pytest.mark.parametrize("name", ["cifar10", "svhn"])
def test_policy_tables_match_torchvision(name: str) -> None:
    """Operations, probabilities and order are equal, and pixels at each sub-policy's magnitude, for both signs."""
    theirs = torchvision.transforms.AutoAugment(torchvision.transforms.AutoAugmentPolicy(name))
    ours, space = parse_policy(name), theirs._augmentation_space(10, PHOTOGRAPH.size[::-1])
    assert isinstance(ours, policies.OneOf) and ours.increasing and len(ours.lines) == len(theirs.policies) == 25
    for line, expected_line in zip(ours.lines, theirs.policies, strict=True):
        for (own, probability, level), (kind, expected_probability, number) in zip(line, expected_line, strict=True):
            assert (own.removesuffix("Original"), probability) == (kind, expected_probability)
            magnitudes, signed = space[kind]
            magnitude = 0.0 if number is None else magnitudes[number].item()
            signs = (1, -1) if signed and magnitude else (1,)
            if kind == "Solarize":  # the paper's thresholds begin at 256, torchvision's at 255
                expected = [by_torchvision(kind, magnitude), by_torchvision(kind, magnitude + 1)]
            elif kind in AFFINE:
                place, part = AFFINE[kind]
                most = part * {2: PHOTOGRAPH.width, 5: PHOTOGRAPH.height}.get(place, 1)
                assert magnitude == pytest.approx(number / 9 * most, rel=1e-2)
                expected = [by_pillow(place, sign * number / 9 * most) for sign in signs]
            else:
                expected = [by_torchvision(kind, sign * magnitude) for sign in signs]
            found = changed_image(own, np.asarray(PHOTOGRAPH), level, np.arange(12), MEAN, ours.increasing)
            # One grey level: Pillow rounds fractions of pixels.
            same = [[bool(np.abs(x.astype(int) - one).max() <= 1) for x in expected] for one in found]
            seen = {which.index(True) if True in which else None for which in same}
            assert None not in seen and (kind == "Solarize" or len(seen) == len(signs)), (line, kind, seen)


@pytest.mark.parametrize(
    "text", ["rand", "rand-m9-n3-mstd0.5", "rand-m9-mstd0.5-inc1", "rand-m8-p0.3-mstd101", "rand-m5-p1"]
)
def test_randaugment_frequencies_and_levels_match_timm(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare how often each operation is applied, and at which levels."""
    increasing, images = "inc1" in text, 10_000
    ours: list[tuple[str, float]] = []
    for name in OPERATIONS:
        record = lambda levels, *_, name=name: ours.extend((name, level) for level in levels.tolist()) or 0  # noqa: E731
        monkeypatch.setitem(OPERATIONS, name, Operation(record))
    assert len([*parse_policy(text).steps(Draws(np.arange(images)), 48)]) == (3 if "n3" in text else 2)
    theirs: list[tuple[str, float]] = []
    transform = timms.rand_augment_transform(text, {**HPARAMS})
    for operation in transform.ops:
        operation.level_fn = lambda level, _, name=operation.name: theirs.append((name, level)) or ()
        operation.aug_fn = lambda image, **_: image
    for _ in range(images):
        transform(PHOTOGRAPH)
    found = Counter(timms_name(name, increasing) for name, _ in ours)
    expected = Counter(name for name, _ in theirs)
    assert set(found) == set(expected) and len(found) == 15
    assert abs(len(ours) - len(theirs)) < 0.05 * len(theirs)
    assert all(abs(found[name] - expected[name]) < 5 * (2 * expected[name]) ** 0.5 for name in expected)
    levels, expected_levels = ([level for _, level in side] for side in (ours, theirs))
    assert_same_distribution(levels, expected_levels, "levels")
    assert np.std(levels) == pytest.approx(np.std(expected_levels), rel=0.05, abs=1e-9)  # more sensitive to the spread
