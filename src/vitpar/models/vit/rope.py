"""Rotary positions of queries and keys in two dimensions (arXiv 2104.09864), as EVA-02 and DINOv3 have them.

Half of a head's features are rotated by a token's row, half by its column. The tables have a row for every token:
those before the patches are rotated by 0, unless register tokens have a grid of their own.
"""

import torch
from torch import Tensor

from vitpar.models.vit.config import ViTConfig


def rope_tables(config: ViTConfig) -> tuple[Tensor, Tensor]:
    """Return (cosines, sines) of all tokens, float32 [tokens, features of a head]."""
    c = config
    before = torch.zeros(c.prefix_tokens, c.head_dim // 2, dtype=torch.float64)
    if c.rope_register_temperature is not None and c.num_reg_tokens:
        side = round(c.num_reg_tokens**0.5)
        rotated = _angles(torch.arange(side).double(), _axial(c.head_dim, c.rope_register_temperature))
        before[c.prefix_tokens - c.num_reg_tokens :] = rotated
    grid = c.image_size // c.patch_size
    if c.rope == "dinov3":
        # Centres of the patches from -1 to 1, in periods from 1 to the temperature.
        places = 2 * (torch.arange(grid).double() + 0.5) / grid - 1
        frequencies = 2 * torch.pi * _axial(c.head_dim, c.rope_temperature)
    else:
        places = torch.arange(grid).double() * ((c.rope_grid or grid) / grid)
        frequencies = _axial(c.head_dim, c.rope_temperature)
    angles = torch.cat([before, _angles(places, frequencies)])
    angles = angles.repeat(1, 2) if c.rope == "dinov3" else angles.repeat_interleave(2, dim=1)
    return angles.cos().float(), angles.sin().float()


def _axial(head_dim: int, temperature: float) -> Tensor:
    """Return the angle of a step to the next row or column, by feature: float64 [head_dim / 4]."""
    return temperature ** (-torch.arange(head_dim // 4).double() / (head_dim // 4))


def _angles(places: Tensor, frequencies: Tensor) -> Tensor:
    """Return the angles of a square grid of tokens: float64 [side², 2 · frequencies]. Rows come before columns."""
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.cat([place.flatten()[:, None] * frequencies for place in (rows, columns)], dim=1)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, *, halves: bool) -> Tensor:
    """Rotate queries or keys.

    x: [batch, heads, tokens, features]; the result has the same shape and dtype.
    cosines, sines: [tokens, features]. They are multiplied in at least their own precision.
    halves: whether a feature is rotated with the one half the features away, instead of its neighbour.
    """
    if halves:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    else:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-second, first], dim=-1).flatten(-2)
    return (x * cosines + turned * sines).to(x.dtype)
