"""Learned positions of one image size for another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def resampled(positions: Tensor, prefix: int, grid: int) -> Tensor:
    """Positions [1, prefix + old², width] of a square grid of patches -> [1, prefix + grid², width].

    prefix: tokens before the patches, whose positions stay. Bicubic with antialiasing, computed in float32, as timm's
    `resample_abs_pos_embed` does (timm/layers/pos_embed.py, 1.0).
    """
    tokens, patches = positions[:, :prefix], positions[:, prefix:]
    old = round(patches.shape[1] ** 0.5)
    image = rearrange(patches.float(), "1 (h w) d -> 1 d h w", h=old)
    image = F.interpolate(image, size=(grid, grid), mode="bicubic", antialias=True)
    return torch.cat([tokens, rearrange(image, "1 d h w -> 1 (h w) d").to(positions.dtype)], dim=1)
