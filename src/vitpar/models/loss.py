"""Losses: what a model's outputs are compared with, and how."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from vitpar.models.config import IGNORED


class Classification:
    """Cross-entropy, averaged over the samples of a batch."""

    def count(self, targets: Tensor) -> int:
        """Return the number of samples."""
        return len(targets)

    def total(self, outputs: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
        """Return the sum of cross-entropies.

        outputs: logits [batch, classes].
        targets: int64 [batch], IGNORED for an image without label; or, for mixed images, float64 [batch, 3]: first
            label, second label, weight of the first.
        """
        loss = functools.partial(F.cross_entropy, outputs, ignore_index=IGNORED, label_smoothing=label_smoothing)
        if targets.ndim == 1:
            return loss(targets, reduction="sum")
        first, other, weight = targets.unbind(1)
        one, two = (loss(label.long(), reduction="none") for label in (first, other))
        return torch.lerp(two, one, weight.to(outputs.dtype)).sum()
