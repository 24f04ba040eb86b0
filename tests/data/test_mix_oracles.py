"""Mixup and CutMix compared with timm's code: boxes pixel for pixel, weights, blended and pasted pixels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.distributions import assert_same_distribution
from helpers.oracles import timm
from vitpar.data.randomness import sample_keys
from vitpar.data.transforms import batch as module
from vitpar.data.transforms.batch import Mix, Mixed

pytestmark = pytest.mark.usefixtures("seeded")
timms = timm.data.mixup


def keys_of(batch: int) -> NDArray[np.int64]:
    zeros = np.zeros(batch, np.int64)
    return sample_keys(0, zeros, np.arange(batch), zeros)


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
