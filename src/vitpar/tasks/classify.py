"""Classification: an output for each label, trained by cross-entropy or by binary cross-entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from vitpar.models.config import IGNORED
from vitpar.tasks.task import Metric, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.models.loss import LabelLoss

TOP = 5
"""Most probable classes that are counted, and that predictions list."""
BINS = 15
"""Bins of equal width for the expected calibration error."""


@dataclass(frozen=True)
class Classify(Task):
    """Classification of images."""

    NAME: ClassVar[str] = "classify"
    OUTPUT: ClassVar[str] = "class"
    METRICS: ClassVar[tuple[Metric, ...]] = (
        Metric("top1", "top-1", share=True),
        Metric("top5", "top-5", share=True),
        Metric("ece", "ECE", share=True, higher=False),
    )
    TRAINING_METRICS: ClassVar[tuple[Metric, ...]] = METRICS[:1]
    MIXES: ClassVar[bool] = True
    OUTPUTS_ARE_LABELS: ClassVar[bool] = True

    label_smoothing: float = 0.0
    """Probability mass that the target of a training spreads over all classes."""
    class_weights: Sequence[float] = ()
    """Weight of each class in the loss of a training, from 0; empty for 1."""
    bce: bool = False
    """Whether to train with binary cross-entropy of every class, as DeiT III does. The options below are for it."""
    bce_sum: bool = False
    """Whether to sum over classes instead of averaging."""
    bce_target_threshold: float | None = None
    """Shares of the target above this become 1 and others 0; after mixing, 0 makes both labels count fully."""
    bce_positive_weight: float = 1.0
    """Weight of the share of the target, relative to that of the rest."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weights", tuple(map(float, self.class_weights)))
        if self.class_weights and len(self.class_weights) != self.outputs:
            raise ValueError(f"class_weights has {len(self.class_weights)} numbers for {self.outputs} classes")
        usable = all(0 <= weight < math.inf for weight in self.class_weights) and any(self.class_weights)
        if self.class_weights and not usable:
            raise ValueError("class_weights must be finite numbers from 0, and one of them larger")
        threshold = self.bce_target_threshold
        if threshold is not None and not 0 <= threshold < 1:
            raise ValueError(f"bce_target_threshold is {threshold}, which is not from 0 and below 1")
        if not 0 < self.bce_positive_weight < math.inf:
            raise ValueError(f"bce_positive_weight is {self.bce_positive_weight}, not a positive number")
        if not self.bce and (self.bce_sum, self.bce_target_threshold, self.bce_positive_weight) != (False, None, 1.0):
            raise ValueError("options of binary cross-entropy without bce = true")

    @property
    def outputs(self) -> int:
        return self.labels.count

    @cached_property
    def loss(self) -> LabelLoss:
        """The loss of a training."""
        from vitpar.models.loss import BinaryCrossEntropy, CrossEntropy

        smoothing, weights = self.label_smoothing, tuple(self.class_weights)
        if not self.bce:
            return CrossEntropy(smoothing, weights)
        return BinaryCrossEntropy(smoothing, weights, self.bce_sum, self.bce_target_threshold, self.bce_positive_weight)

    def counted_targets(self, labels: Tensor) -> Tensor:
        return labels

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss.total(outputs, targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss.measure(outputs, targets)

    def count(self, targets: Tensor, batch: int) -> int | Tensor:
        return self.loss.count(targets, batch)

    def reference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._reference(outputs, self._one_hot(outputs, targets))

    def reference_mixed(self, outputs: Tensor, first: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        one, two = (self._one_hot(outputs, labels) for labels in (first, other))
        return self._reference(outputs, weight[:, None] * one + (1 - weight[:, None]) * two)

    def _one_hot(self, outputs: Tensor, targets: Tensor) -> Tensor:
        import torch

        return torch.eye(self.outputs, dtype=outputs.dtype, device=outputs.device)[targets]

    def _reference(self, outputs: Tensor, p: Tensor) -> Tensor:
        """Return -Σ w·p·log q for targets p, smoothed, weights w and probabilities q.

        With binary cross-entropy also the same of 1 - p and 1 - q, and q is that of each class alone.
        """
        import torch

        w = torch.tensor(self.class_weights or [1.0] * self.outputs).to(outputs)
        p = (1 - self.label_smoothing) * p + self.label_smoothing / self.outputs
        if not self.bce:
            return -(w * p * outputs.log_softmax(1)).sum(1)
        if self.bce_target_threshold is not None:
            p = (p > self.bce_target_threshold).to(outputs)
        # log q = -log(1 + exp(-x)), log(1 - q) = -log(1 + exp(x)).
        here, rest = torch.logaddexp(-outputs, outputs.new_zeros(())), torch.logaddexp(outputs, outputs.new_zeros(()))
        losses = w * (self.bce_positive_weight * p * here + (1 - p) * rest)
        return losses.sum(1) if self.bce_sum else losses.sum(1) / self.outputs

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return sums over samples: [samples, loss without smoothing, top-1 hits, top-5 hits, …].

        Then follow the summed confidence in each of `BINS` bins of the confidence, and the top-1 hits in each.
        """
        import torch
        import torch.nn.functional as F

        loss = F.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="sum")
        best = outputs.topk(min(TOP, outputs.shape[1]), dim=1).indices  # no class is IGNORED, so padding never hits
        hits = (best == targets[:, None]).double()
        usable = (targets != IGNORED).double()
        confidence = outputs.softmax(dim=1).amax(dim=1)
        # Bin m has confidences above (m - 1) / BINS, up to m / BINS (Guo et al. 2017, arXiv:1706.04599).
        bins = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)
        binned = outputs.new_zeros(2, BINS).index_add_(1, bins, torch.stack([usable * confidence, hits[:, 0]]))
        return torch.cat([torch.stack([usable.sum(), loss, hits[:, 0].sum(), hits.sum()]), binned.flatten()])

    def result(self, sums: Tensor) -> dict[str, float]:
        """Return loss, top-1 and top-5 accuracy, and the expected calibration error.

        That is the mean difference of confidence and accuracy over the bins of the confidence, weighted by the images
        in each.
        """
        samples, loss, top1, top5 = sums[:4].tolist()
        confidence, correct = sums[4:].view(2, BINS)
        error = (confidence - correct).abs().sum().item() / samples
        return {"loss": loss / samples, "top1": top1 / samples, "top5": top5 / samples, "ece": error}

    def predict(self, outputs: Tensor) -> Mapping[str, Tensor]:
        """Return the most probable class and its probability, and those of the `TOP` most probable classes."""
        classes = outputs.topk(min(TOP, outputs.shape[1]), dim=1).indices
        probabilities = outputs.softmax(dim=1).gather(1, classes)
        return {
            "predicted": classes[:, 0],
            "probability": probabilities[:, 0],
            "top5_classes": classes,
            "top5_probabilities": probabilities,
        }

    def answers(self, outputs: Tensor, most: int, names: Sequence[str] | None) -> list[list[dict[str, Any]]]:
        """Return the `most` most probable classes of each image."""
        best = outputs.softmax(dim=1).topk(min(most, outputs.shape[1]), dim=1)
        return [
            [
                {"class": number, "name": names[number] if names else None, "probability": share}
                for number, share in zip(numbers, shares, strict=True)
            ]
            for numbers, shares in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
