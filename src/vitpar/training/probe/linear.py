"""Linear classifiers on the features of a frozen model, one for each learning rate, all trained at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpar.training.probe.read import Features

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
"""Learning rates of DINOv2's linear evaluation (arXiv 2304.07193), for a batch of 256."""
_REFERENCE = 256
"""Batch size that learning rates are for; they grow with it."""
_SPREAD = 0.01
"""Standard deviation of initial weights."""
_CHUNK = 4096
"""Images whose logits are computed at once."""


@dataclass(frozen=True)
class LinearProbe:
    """Settings of the training: SGD with momentum 0.9 and half a cosine, without augmentation."""

    rates: Sequence[float] = RATES
    """Learning rates for a batch of 256, one for each classifier."""
    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 1024
    """Images of a step; at most all of them."""
    weight_decay: float = 0.0
    """L2 penalty of the weights, not of the biases."""
    standardize: bool = False
    """Whether features get mean 0 and variance 1 over the training images, as by the BatchNorm of MAE's probe."""
    seed: int = 0
    """Seed of initial weights and of the order of images."""


@dataclass(frozen=True)
class Probed:
    """A classifier and its accuracy."""

    rate: float
    """Learning rate."""
    weight: Tensor
    """Weights for features that are not standardised, float32 [classes, features]."""
    bias: Tensor
    """Biases, float32 [classes]."""
    train: float
    """Share of the training images that it classifies correctly."""
    val: float
    """Share of the validation images that it classifies correctly."""


def train_classifiers(
    train: Features,
    val: Features,
    classes: int,
    settings: LinearProbe,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Probed]:
    """Train a classifier for each learning rate, and return them in that order.

    classes: outputs of a classifier.
    progress: callback (steps done, steps in total).
    """
    x, labels = train.embeddings.to(device), train.labels.to(device)
    mean, deviation = _scale(x, settings.standardize)
    generator = torch.Generator().manual_seed(settings.seed)
    rates = torch.tensor(settings.rates, device=device).view(-1, 1, 1)
    weight = torch.randn(classes, x.shape[1], generator=generator).mul_(_SPREAD).to(device)
    weight = weight.expand(len(rates), -1, -1).clone()
    bias = torch.zeros(len(rates), 1, classes, device=device)
    momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
    size = min(settings.batch_size, len(x))
    batches = len(x) // size
    steps = settings.epochs * batches
    for step in range(steps):
        if step % batches == 0:
            order = torch.randperm(len(x), generator=generator).to(device)
        chosen = order[step % batches * size : (step % batches + 1) * size]
        rows = (x[chosen] - mean) / deviation
        # the gradient of the mean cross-entropy by the logits: softmax - one-hot, over the batch
        slope = torch.softmax(rows @ weight.mT + bias, dim=-1)
        slope -= F.one_hot(labels[chosen], classes)
        slope /= len(rows)
        gradients = slope.mT @ rows + settings.weight_decay * weight, slope.sum(1, keepdim=True)
        rate = rates * (size / _REFERENCE) * (1 + math.cos(math.pi * step / steps)) / 2
        for parameter, momentum, gradient in zip((weight, bias), momenta, gradients, strict=True):
            momentum.mul_(0.9).add_(gradient)
            parameter -= rate * momentum
        progress(step + 1, steps)
    weight /= deviation
    bias = bias[:, 0] - weight @ mean
    shares = [_accuracies(one, weight, bias, device).tolist() for one in (train, val)]
    found = zip(settings.rates, weight.cpu(), bias.cpu(), *shares, strict=True)
    return [Probed(*one) for one in found]


def _scale(x: Tensor, standardize: bool) -> tuple[Tensor, Tensor]:
    """Return what is subtracted from features and what divides them, [features] each."""
    if not standardize:
        return x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])
    return x.mean(0), (x.var(0, correction=0) + 1e-6).sqrt()


def _accuracies(given: Features, weight: Tensor, bias: Tensor, device: torch.device) -> Tensor:
    """Return the share of images that each classifier gets right, [classifiers]; 0 for one that has diverged."""
    right = torch.zeros(len(weight), dtype=torch.int64, device=device)
    for rows, labels in zip(given.embeddings.split(_CHUNK), given.labels.split(_CHUNK), strict=True):
        logits = rows.to(device) @ weight.mT + bias[:, None]
        right += (logits.argmax(-1) == labels.to(device)).sum(1)
    finite = weight.isfinite().flatten(1).all(1) & bias.isfinite().all(1)
    return right.where(finite, 0) / len(given.labels)
