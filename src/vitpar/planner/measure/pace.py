"""How fast the cores are just now.

On a machine whose cores others use too, the same instructions take up to twice as long as a second ago, and plans that
are measured minutes after a profile meet another machine. So everything that is timed on a CPU is timed beside a fixed
piece of work, and given as if that had always taken equally long.
"""

from __future__ import annotations

import time

import torch
from torch import nn


class Pace:
    """An MLP, forward and backward, that fits into no core's own caches: slowed down by what slows down a ViT's layers,
    as products alone are not."""

    def __init__(self, rows: int = 512, width: int = 128) -> None:
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self._mlp, self._x = nn.Sequential(*layers), torch.ones(rows, width)
        self._parameters = tuple(self._mlp.parameters())

    def read(self) -> float:
        """Seconds of a core that the work takes, some thousandths: not those in which our other processes have it."""
        begun = time.thread_time()
        torch.autograd.grad(self._mlp(self._x).sum(), self._parameters)
        return time.thread_time() - begun
