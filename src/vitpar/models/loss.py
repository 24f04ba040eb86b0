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
class CrossEntropy:
    """Cross-entropy, averaged over the samples of a batch."""

    label_smoothing: float = 0.0
    """Probability mass that the target spreads over all classes, 0 to 1."""

    def count(self, targets: Tensor, batch: int) -> int:
        """Return the number of samples."""
        return batch

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of cross-entropies.

        outputs: logits [batch, classes].
        targets: int64 [batch], IGNORED for an image without label; or, for mixed images, float64 [batch, 3]: first
            label, second label, weight of the first.
        """
        loss = functools.partial(F.cross_entropy, outputs, ignore_index=IGNORED, label_smoothing=self.label_smoothing)
        if targets.ndim == 1:
            return loss(targets, reduction="sum")
        first, other, weight = targets.unbind(1)
        one, two = (loss(label.long(), reduction="none") for label in (first, other))
        return torch.lerp(two, one, weight.to(outputs.dtype)).sum()

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of samples that are not mixed, and how many of them have the correct class first."""
        if targets.ndim == 2:
            targets = torch.where(targets[:, 2] == 1.0, targets[:, 0], IGNORED).long()
        counted = targets != IGNORED
        return torch.stack([counted.sum(), (outputs.argmax(1) == targets).sum()]).double()
