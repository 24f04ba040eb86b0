"""Masked autoencoding: pixels of the patches that the encoder does not see, from those that it sees (2111.06377)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitpar.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.models.config import ModelConfig
    from vitpar.models.mae.config import MAEConfig

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
    IMAGE_TARGETS: ClassVar[bool] = True
    PREDICTS: ClassVar[bool] = False
    PICTURES: ClassVar[str] = (
        "Visible patches of a reconstruction are those of the original; where the loss normalises patches, masked "
        "patches have the original's mean and deviation."
    )

    norm_pix_loss: bool = True
    """Whether the pixels of each patch are normalised by their mean and variance to give the target."""

    @property
    def outputs(self) -> int:
        """The model alone decides how many outputs it has."""
        return 1

    def local_targets(self, images: Tensor, keys: Tensor, config: ModelConfig) -> Tensor:
        pixels, counts = _patches(images, keys, config)
        if self.norm_pix_loss:
            mean, deviation = _moments(pixels)
            pixels = (pixels - mean) / deviation
        return pixels.masked_fill(~counts, float("nan"))

    def pictures(self, outputs: Tensor, images: Tensor, keys: Tensor, config: ModelConfig) -> Mapping[str, Tensor]:
        """Return what the encoder sees, and the images with the outputs in the places of masked patches."""
        from einops import rearrange

        pixels, hidden = _patches(images, keys, config)
        if self.norm_pix_loss:
            mean, deviation = _moments(pixels)
            outputs = outputs * deviation + mean
        made = {"masked": pixels.masked_fill(hidden, float("nan")), "reconstruction": outputs.where(hidden, pixels)}
        p = _mae(config).patch_size
        whole, h = "b (h w) (p q c) -> b c (h p) (w q)", images.shape[2] // p
        return {name: rearrange(picture, whole, h=h, p=p, q=p) for name, picture in made.items()}

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
        from vitpar.models.mae.layers import masking_noise

        config = _mae(config)
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


def _mae(config: ModelConfig) -> MAEConfig:
    """Return the configuration of the model, which is of the task's family."""
    from vitpar.models.mae.config import MAEConfig

    config = config.unadapted
    assert isinstance(config, MAEConfig), "the task has been checked to fit the model"
    return config


def _patches(images: Tensor, keys: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return the pixels of every patch, [samples, patches, pixels · channels], and whether it is masked, bool [.., 1].

    Arguments are those of ``Task.local_targets``.
    """
    from einops import rearrange

    from vitpar.models.mae.layers import masked

    c = _mae(config)
    pixels = rearrange(images, "b c (h p) (w q) -> b (h w) (p q c)", p=c.patch_size, q=c.patch_size)
    return pixels, masked(keys, c.patches, c.visible)[..., None]


def _moments(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of each patch, [samples, patches, 1] both."""
    import torch

    variance, mean = torch.var_mean(pixels, dim=-1, keepdim=True)
    return mean, (variance + EPS).sqrt()
