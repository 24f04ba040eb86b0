"""Lion: steps of the same size for every element, in the direction of the sign of an averaged gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from vitpar.training.optim.layerwise import Group, OverShards, gradients


class Lion(OverShards):
    """Lion over local shards, as timm's without its options. State of each shard: `exp_avg`.

    groups: with `weight_decay`, which is decoupled.
    betas: of the average that the sign is taken of, and of the one that is kept.

    Source: "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2.
    """

    def __init__(self, groups: list[Group], *, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    def _update(self, number: int, group: Group, shards: list[Tensor]) -> None:
        grads, (means,) = gradients(shards), self._remembered(shards, "exp_avg")
        beta1, beta2 = group["betas"]
        directions = list(torch._foreach_lerp(means, grads, 1 - beta1))
        torch._foreach_sign_(directions)
        torch._foreach_mul_(shards, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(shards, directions, alpha=-group["lr"])
        torch._foreach_lerp_(means, grads, 1 - beta2)
