"""Optimizers over sharded parameters.

AdamW and SGD treat every element alone, so they run on each rank's local shards as plain tensors: torch's own foreach
and fused implementations work whatever mix of meshes the parameters live on, and no DTensor operation is dispatched in
the step. (upstream: foreach and fused optimizers refuse a mix of DTensors of different meshes.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from vitpar.train.recipe import OptimizerSection

NO_DECAY = (".bias", "norm", "pos_embed", "_token", "gamma")
"""Parts of a parameter's name that exempt it from weight decay."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter `name`: matrices only."""
    return not any(part in name for part in NO_DECAY)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor as a plain tensor sharing its memory; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class ShardedOptimizer:
    """A torch optimizer over the local shards of named parameters.

    parameters: (name, parameter) pairs of this rank. Shards without elements are left out.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSection) -> None:
        self._pairs = {name: (p, nn.Parameter(local(p.detach()))) for name, p in parameters if local(p).numel()}
        groups = []
        for decay in (True, False):
            shards = [shard for name, (_, shard) in self._pairs.items() if decays(name) is decay]
            if shards:
                groups.append({"params": shards, "weight_decay": settings.weight_decay if decay else 0.0})
        self.torch_optimizer = _torch_optimizer(groups, settings)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that exist, by parameter name, sharded as the parameters are."""
        return {name: p.grad for name, (p, _) in self._pairs.items() if p.grad is not None}

    def step(self, lr: float) -> None:
        """One update with learning rate `lr`, then forget the gradients."""
        for parameter, shard in self._pairs.values():
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()
        for parameter, shard in self._pairs.values():
            parameter.grad = shard.grad = None


def _torch_optimizer(groups: list[dict], settings: OptimizerSection) -> torch.optim.Optimizer:
    fused = {"fused": True}
    choices = {"auto": fused, "fused": fused, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    options = choices[settings.implementation]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum, **options)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, **options)
