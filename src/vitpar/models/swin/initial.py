"""Initial values of the Swin Transformer's parameters (``vitpar.models.initial``)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vitpar.models.swin.config import SwinConfig

Rule = Callable[[Tensor, torch.Size, SwinConfig], Tensor]
"""Uniform numbers in (-1, 1), float64; the parameter's shape; the model -> as many values. May change the numbers."""


def _constant(value: float) -> Rule:
    return lambda v, shape, c: torch.full_like(v, value)


def _normal(std: float, mean: float = 0.0) -> Rule:
    return lambda v, shape, c: v.erfinv_().mul_(math.sqrt(2) * std).add_(mean)


def _lecun_normal(v: Tensor, shape: torch.Size, c: SwinConfig) -> Tensor:
    """Normal numbers with a deviation of 1/sqrt(fan in)."""
    return _normal(1 / math.sqrt(shape[1]))(v, shape, c)


def _torch_convolution(v: Tensor, shape: torch.Size, c: SwinConfig) -> Tensor:
    """``nn.Conv2d.reset_parameters`` for the patches' weight and bias."""
    return v.div_(math.sqrt(c.channels * c.patch_size**2))


SCHEMES: dict[str, tuple[tuple[str, Rule], ...]] = {
    # timm's trunc_normal_ cuts at ±2, which is 100 deviations here: it cuts nothing off.
    "timm": (
        ("*norm*.weight", _constant(1.0)),
        ("*norm*.bias", _constant(0.0)),
        ("embed.patch_embed.proj.*", _torch_convolution),
        ("*.bias", _constant(0.0)),
        ("*", _normal(0.02)),
    ),
    # Biases by relative position as large as the scores, so that mistakes in them show.
    "perturbed": (
        ("*norm*.weight", _normal(0.1, mean=1.0)),
        ("*.relative_position_bias_table", _normal(0.5)),
        ("*.bias", _normal(0.05)),
        ("*.weight", _lecun_normal),
    ),
}
"""The rules of each scheme; the first pattern that matches a parameter's name decides."""
