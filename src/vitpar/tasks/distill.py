"""Distillation: classification that also learns from the logits of a teacher (DeiT, arXiv 2012.12877)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitpar.errors import RecipeError
from vitpar.models.config import IGNORED, ModelConfig
from vitpar.tasks.classify import Classify

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Distill(Classify):
    """Classification of images with a teacher.

    Targets of a training are float64 [batch, n + classes]: labels, n = 1, or those of mixed images, n = 3
    (``vitpar.models.loss.LabelLoss``), then the teacher's logits. Outputs are the logits of the model's classifiers
    side by side: the first learns the labels, the last from the teacher. Evaluation is that of classification.
    """

    DISTILLED: ClassVar[bool] = True

    kind: str = "hard"
    """Loss of the teacher: hard, soft or logits, as in ``DistillSection``."""
    alpha: float = 0.5
    """Share of the teacher in the loss."""
    tau: float = 1.0
    """Temperature of both logits, except under hard."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights:
            raise ValueError("class_weights, which divide the sum over labels, do not go with a teacher")

    def refuse_model(self, config: ModelConfig) -> None:
        super().refuse_model(config)
        if (len(config.classifiers) > 1) == (self.kind != "logits"):
            return
        if self.kind == "logits":
            fix = "set distill.kind to hard or soft, or model.distillation to false"
            raise RecipeError(
                f"distill.kind is 'logits', but {config.name} has a distillation token, which is to learn from the "
                f"teacher alone: {fix}"
            )
        fix = "set model.distillation to true, or distill.kind to logits"
        if config.FAMILY != "vit":
            fix = "set distill.kind to logits"
        raise RecipeError(f"distill.kind is '{self.kind}', but {config.name} has no distillation token: {fix}")

    def with_teacher(self, targets: Tensor, logits: Tensor) -> Tensor:
        """Return the targets of a training.

        targets: int64 [batch], or float64 [batch, 3] of mixed images.
        logits: the teacher's, [batch, classes].
        """
        import torch

        labels = targets[:, None] if targets.ndim == 1 else targets
        return torch.cat([labels.double(), logits.double()], dim=1)

    def count(self, targets: Tensor, batch: int) -> int:
        return batch

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        heads = outputs.split(self.outputs, dim=1)
        targets, logits = self._parted(targets)
        usable = (targets if targets.ndim == 1 else targets[:, 0]) != IGNORED
        taught = self._from_teacher(heads[-1], logits.to(outputs.dtype)).where(usable, 0.0).sum()
        return (1 - self.alpha) * self.loss.total(heads[0], targets) + self.alpha * taught

    def _from_teacher(self, outputs: Tensor, logits: Tensor) -> Tensor:
        """Return the loss of each sample, [batch]: DeiT's ``DistillationLoss``, whose sum it divides by the batch.

        logits: the teacher's.
        """
        import torch.nn.functional as F

        if self.kind == "hard":
            return F.cross_entropy(outputs, logits.argmax(dim=1), reduction="none")
        mine, theirs = ((x / self.tau).log_softmax(dim=1) for x in (outputs, logits))
        return F.kl_div(mine, theirs, reduction="none", log_target=True).mean(dim=1) * self.tau**2

    def measure(self, outputs: Tensor, targets: Tensor) -> Tensor:
        import torch

        heads = outputs.split(self.outputs, dim=1)
        return super().measure(torch.stack(heads).mean(dim=0), self._parted(targets)[0])

    def _parted(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the targets of the labels, and the teacher's logits."""
        labels, logits = targets.split([targets.shape[1] - self.outputs, self.outputs], dim=1)
        return (labels if labels.shape[1] > 1 else labels[:, 0].long()), logits

    def _reference(self, outputs: Tensor, p: Tensor) -> Tensor:
        return (1 - self.alpha) * super()._reference(outputs[:, : self.outputs], p)

    def reference_from_teacher(self, outputs: Tensor, logits: Tensor) -> Tensor:
        """Return what the teacher adds to the loss of each sample by a formula of its own, for `vitpar check`."""
        import torch

        taught = outputs[:, -self.outputs :]
        if self.kind == "hard":
            return -self.alpha * torch.stack(
                [row[best] for row, best in zip(taught.log_softmax(1), logits.argmax(1).tolist(), strict=True)]
            )
        p, q = ((x / self.tau).softmax(1) for x in (logits, taught))
        return self.alpha * self.tau**2 / self.outputs * (p * (p / q).log()).sum(1)
