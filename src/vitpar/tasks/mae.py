"""Masked autoencoding: pixels of the patches that the encoder does not see, from those that it sees (2111.06377)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitpar.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.models.config import ModelConfig

EPS = 1e-6
"""Number that is added to the variance of a patch before its pixels are divided by its root."""


@dataclass(frozen=True)
class MAE(Task):
    """Masked autoencoding of images, whose labels are not used.

    Targets are the pixels of every patch, [batch, patches, pixels · channels], NaN for patches that do not count: those
    that the encoder sees, and those of images that could not be read.
    """

    NAME: ClassVar[str] = "mae"
    FAMILIES: ClassVar[tuple[str, ...]] = ("mae",)
    LOCAL_TARGETS: ClassVar[bool] = True
    PREDICTS: ClassVar[bool] = False

    norm_pix_loss: bool = True
    """Whether the pixels of each patch are normalised by their mean and variance to give the target."""

    @property
    def outputs(self) -> int:
        """The model alone decides how many outputs it has."""
        return 1

    def local_targets(self, images: Tensor, keys: Tensor, config: ModelConfig) -> Tensor:
        import torch
        from einops import rearrange

        from vitpar.models.mae.config import MAEConfig
        from vitpar.models.mae.masking import masked

        assert isinstance(config, MAEConfig), "the task has been checked to fit the model"
        p = config.patch_size
        pixels = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=p, q=p)
        if self.norm_pix_loss:
            variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
            pixels = (pixels - mean) / (variance + EPS).sqrt()
        counts = masked(keys, config.patches, config.visible)
        return pixels.where(counts[..., None], torch.full_like(pixels, float("nan")))

    def count(self, targets: Tensor, batch: int) -> int:
        """Return the number of samples: each has equally many masked patches."""
        return batch

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over samples of the mean squared error of all pixels of masked patches, 0-dim."""
        return self._errors(outputs, targets).sum()

    def sums(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of samples that count, and the sum of their losses, float64."""
        import torch

        usable = (~targets.isnan()).flatten(1).any(1)
        return torch.stack([usable.sum().double(), self._errors(outputs, targets).double().sum()])

    def _errors(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, [batch]; 0 for one without targets."""
        counts = ~targets[..., 0].isnan()  # [batch, patches]
        errors = (outputs - targets.nan_to_num(0.0)).square().mean(dim=-1).where(counts, 0.0)
        return errors.sum(dim=1) / counts.sum(dim=1).clamp(min=1)

    def reference_targets(self, images: Tensor, keys: Tensor, config: ModelConfig) -> Tensor:
        """Return what `local_targets` returns, by loops over images and patches."""
        from vitpar.models.mae.config import MAEConfig
        from vitpar.models.mae.masking import masking_noise

        assert isinstance(config, MAEConfig), "the task has been checked to fit the model"
        p, side = config.patch_size, config.image_size // config.patch_size
        targets = images.new_full((len(images), config.patches, config.patch_values), float("nan"))
        for sample, (image, noise) in enumerate(zip(images, masking_noise(keys, config.patches).tolist(), strict=True)):
            order = sorted(range(config.patches), key=noise.__getitem__)
            for patch in order[config.visible :]:
                row, column = divmod(patch, side)
                pixels = image[:, row * p : (row + 1) * p, column * p : (column + 1) * p]
                values = pixels.permute(1, 2, 0).flatten()
                if self.norm_pix_loss:
                    centred = values - values.sum() / len(values)
                    values = centred / ((centred**2).sum() / (len(values) - 1) + EPS) ** 0.5
                targets[sample, patch] = values
        return targets

    def reference(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample by a loop over its patches."""
        import torch

        losses = []
        for output, target in zip(outputs, targets, strict=True):
            counts = ~target.isnan().any(1)
            errors = [((o - t) ** 2).sum() / len(t) for o, t in zip(output[counts], target[counts], strict=True)]
            losses.append(torch.stack(errors).sum() / len(errors))
        return torch.stack(losses)

    def trial(self) -> tuple[Tensor, Tensor]:
        import torch

        return torch.zeros(1, 1, 1).double(), torch.zeros(1, 1, 1)
