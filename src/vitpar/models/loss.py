"""Losses: sums over samples, which micro-batches and ranks just add up."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpar.models.config import IGNORED


class Loss(Protocol):
    """A sum over samples divided by a number that all ranks agree on, whatever micro-batches and ranks hold.

    Outputs are float32 or float64; logits of tokens [batch, tokens, vocabulary] are in the type in which the model
    computes. Where tensor parallelism splits the vocabulary (``ParallelModel.vocabulary``), `total` and `measure` get
    this rank's part of the logits and as third argument a ``vitpar.parallel.vocabulary.VocabularyPart``. They return
    the sums over the complete vocabulary, as `token_losses` of that module does.

    A loss with a true `DISTILLED` gets the logits of all classifiers of the model, [batch, classifiers · classes].
    """

    def count(self, targets: Tensor, batch: int) -> int | Tensor:
        """Return the number that the sum over a step is divided by.

        targets: those of the complete batch, or of this rank's outputs if the loss has a true `LOCAL_TARGETS`.
        batch: samples of the complete batch.
        """

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over the samples of `outputs`, 0-dim. targets: those of the same samples."""

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Return further sums over the same samples, 1-dim, to report with a training step; None for none.

        Without gradients. The host must not wait for the device.
        """


@dataclass(frozen=True)
class LabelLoss:
    """Base of losses of labels, hard or mixed.

    Targets are int64 [batch], IGNORED for an image without label; or, for mixed images, float64 [batch, 3]: first
    label, second label, weight of the first.
    """

    label_smoothing: float = 0.0
    """Probability mass that the target spreads over all classes, 0 to 1."""
    class_weights: tuple[float, ...] = ()
    """Weight of each class in the loss; empty for 1."""

    def count(self, targets: Tensor, batch: int) -> int | Tensor:
        """Return the number of samples."""
        return batch

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over the samples. outputs: logits [batch, classes]."""
        raise NotImplementedError

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of samples that are not mixed, and how many of them have the correct class first."""
        if targets.ndim == 2:
            targets = torch.where(targets[:, 2] == 1.0, targets[:, 0], IGNORED).long()
        counted = targets != IGNORED
        return torch.stack([counted.sum(), (outputs.argmax(1) == targets).sum()]).double()

    def _weights(self, like: Tensor) -> Tensor | None:
        return constant(self.class_weights, like.device).to(like.dtype) if self.class_weights else None


@dataclass(frozen=True)
class CrossEntropy(LabelLoss):
    """Cross-entropy, averaged over the samples of a batch.

    With class weights it is torch's CrossEntropyLoss: unless images are mixed, the sum is divided by the sum of the
    weights of their labels.
    """

    def count(self, targets: Tensor, batch: int) -> int | Tensor:
        """Return the number of samples; with class weights, the sum of those of hard targets."""
        if not self.class_weights or targets.ndim == 2:
            return batch
        usable = targets != IGNORED
        weights = constant(self.class_weights, targets.device)[targets.clamp(min=0)]
        return weights.where(usable, 0.0).sum().clamp(min=torch.finfo(weights.dtype).tiny)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of cross-entropies. outputs: logits [batch, classes]."""
        loss = functools.partial(
            F.cross_entropy,
            outputs,
            weight=self._weights(outputs),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing,
        )
        if targets.ndim == 1:
            return loss(targets, reduction="sum")
        first, other, weight = targets.unbind(1)
        one, two = (loss(label.long(), reduction="none") for label in (first, other))
        return torch.lerp(two, one, weight.to(outputs.dtype)).sum()


@dataclass(frozen=True)
class BinaryCrossEntropy(LabelLoss):
    """Binary cross-entropy of every class with its share of the target, averaged over classes and samples.

    Source: timm's BinaryCrossEntropy, whose options these are.
    """

    summed: bool = False
    """Whether classes are summed instead of averaged."""
    threshold: float | None = None
    """Shares of the target above this become 1, others 0."""
    positive_weight: float = 1.0
    """Weight of the share of the target, relative to that of the rest."""

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over the samples. outputs: logits [batch, classes]."""
        hard = targets if targets.ndim == 1 else targets[:, 0]
        positive = constant((self.positive_weight,), outputs.device).to(outputs.dtype)
        losses = F.binary_cross_entropy_with_logits(
            outputs, self._shares(outputs, targets), self._weights(outputs), reduction="none", pos_weight=positive
        )
        each = losses.sum(1) if self.summed else losses.mean(1)
        return each.where(hard != IGNORED, 0.0).sum()

    def _shares(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of each class in the target, [batch, classes], of the type of `outputs`."""
        classes = torch.arange(outputs.shape[1], device=outputs.device)
        if targets.ndim == 1:
            labels = (classes == targets[:, None]).to(outputs.dtype)
        else:
            first, other, weight = targets[:, :, None].unbind(1)
            labels = (weight * (classes == first) + (1 - weight) * (classes == other)).to(outputs.dtype)
        shares = self.label_smoothing / len(classes) + (1 - self.label_smoothing) * labels
        return shares if self.threshold is None else (shares > self.threshold).to(outputs.dtype)


@functools.cache
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers on a device, float64. They are cached, because a copy to a GPU waits for the GPU."""
    return torch.tensor(values, dtype=torch.float64, device=device)
