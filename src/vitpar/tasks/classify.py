"""Classification: an output for each label, trained by cross-entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from vitpar.models.config import IGNORED
from vitpar.tasks.task import Metric, Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.models.loss import CrossEntropy

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

    @property
    def outputs(self) -> int:
        return self.labels.count

    @cached_property
    def loss(self) -> CrossEntropy:
        """The loss of a training."""
        from vitpar.models.loss import CrossEntropy

        return CrossEntropy(self.label_smoothing)

    def counted_targets(self, labels: Tensor) -> Tensor:
        return labels

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss.total(outputs, targets)

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss.measure(outputs, targets)

    def reference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return -Σ p·log q for the smoothed target p and the model's probabilities q."""
        import torch

        smooth = torch.full_like(outputs, self.label_smoothing / self.outputs)
        smooth[torch.arange(len(targets)), targets] += 1 - self.label_smoothing
        return -(smooth * outputs.log_softmax(1)).sum(1)

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
