"""From uint8 to the model's numbers, on the device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from vitpar.errors import RecipeError


@dataclass(frozen=True)
class Normalize:
    """(pixel / 255 - mean) / std for every channel. The default maps pixels to [-1, 1].

    compiled: whether it is one operation of the compiler's, which reads and writes every image once, and not four.
    """

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    compiled: bool = False

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise RecipeError(f"std {self.std} must be positive in every channel")

    def __call__(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """images: uint8 [batch, 3, height, width] on any device. Returns `dtype`, of the same shape."""
        mean, std = _channels(self.mean, images.device), _channels(self.std, images.device)
        return (_compiled() if self.compiled else _normalized)(images, mean, std, dtype)


def _normalized(images: Tensor, mean: Tensor, std: Tensor, dtype: torch.dtype) -> Tensor:
    return images.float().sub(mean).div_(std).to(dtype)


@cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]:
    return torch.compile(_normalized)


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> Tensor:
    """0..1 values as 0..255 ones, [3, 1, 1] on `device`; made once, since copying to a GPU waits for it."""
    return torch.tensor(values, device=device).mul_(255)[:, None, None]
