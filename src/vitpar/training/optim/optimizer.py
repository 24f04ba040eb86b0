"""Optimizers over sharded parameters.

All run on each rank's local shards as plain tensors: foreach and fused implementations work whatever mix of meshes the
parameters live on, and no elementwise DTensor operation is dispatched in the step. (upstream: foreach and fused
optimizers refuse a mix of DTensors of different meshes.) AdamW and SGD treat every element alone and are torch's own.
LAMB, LARS and Muon depend on whole parameters too: they know of each shard what it is a part of, and send what they
need.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vitpar.training.optim.layerwise import LAMB, LARS
from vitpar.training.optim.muon import Matrix, Muon

if TYPE_CHECKING:
    from vitpar.training.recipe.optimizer_section import OptimizerSection

NO_DECAY = (".bias", "norm", "pos_embed", "_token", "gamma")
"""Parts of a parameter's name that exempt it from weight decay."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter `name`: matrices only."""
    return not any(part in name for part in NO_DECAY)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor as a plain tensor sharing its memory; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_as(parameter: Tensor, shard: Tensor) -> Tensor:
    """The tensor whose part on this rank is `shard`, in the layout of `parameter`, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return shard
    # Not DTensor.from_local: that copies an offloaded shard to the mesh's device.
    return DTensor(shard, parameter._spec, requires_grad=False)


class ShardedOptimizer:
    """An optimizer over the local shards of named parameters.

    parameters: (name, parameter) pairs of this rank, in the order of the whole model. heads: attention heads of the
    model, which muon needs to tell queries, keys and values apart.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], settings: OptimizerSection, *, heads: int | None = None
    ) -> None:
        # Where elements are treated alone there is nothing to do for an empty shard; otherwise its rank takes part in
        # what the ranks of the whole parameter send each other.
        alone = settings.name in ("adamw", "sgd")
        self._pairs = {
            name: (p, nn.Parameter(local(p.detach()))) for name, p in parameters if local(p).numel() or not alone
        }
        groups = []
        for decay in (True, False):
            shards = [shard for name, (_, shard) in self._pairs.items() if decays(name) is decay]
            if shards:
                groups.append({"params": shards, "weight_decay": settings.weight_decay if decay else 0.0})
        self.torch_optimizer = _torch_optimizer(groups, settings, self._pairs, heads)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that exist and have elements here, by parameter name, sharded as the parameters are."""
        return {name: p.grad for name, (p, s) in self._pairs.items() if p.grad is not None and s.numel()}

    def state(self) -> dict[str, Tensor]:
        """What is remembered from step to step, by `exp_avg.<parameter>` and the like: sharded as the parameter is,
        sharing memory, or a single number. Empty before the first step and `allocate`."""
        found = {}
        for name, (parameter, shard) in self._pairs.items():
            for key, value in self.torch_optimizer.state[shard].items():
                if isinstance(value, Tensor):
                    found[f"{key}.{name}"] = sharded_as(parameter, value) if value.shape == shard.shape else value
        return found

    def allocate(self) -> None:
        """Make the state that the first step would, to be filled. Collective where `step` is.

        A step of gradients and learning rate 0: how else the optimizers of torch lay out their state is their affair.
        """
        for _, shard in self._pairs.values():
            shard.grad = torch.zeros_like(shard)
        self._update(lr=0.0)

    def forget(self) -> None:
        """As before the first step."""
        self.torch_optimizer.state.clear()

    def skip(self) -> None:
        """Forget the gradients without an update."""
        for parameter, _ in self._pairs.values():
            parameter.grad = None

    def step(self, lr: float) -> None:
        """One update with learning rate `lr`, then forget the gradients. Collective for LAMB, LARS and Muon."""
        for parameter, shard in self._pairs.values():
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        self._update(lr)

    def _update(self, lr: float) -> None:
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr
        self.torch_optimizer.step()
        for parameter, shard in self._pairs.values():
            parameter.grad = shard.grad = None


_Pairs = dict[str, tuple[nn.Parameter, nn.Parameter]]
"""A parameter and its local shard, by the parameter's name."""


def _torch_optimizer(
    groups: list[dict], settings: OptimizerSection, pairs: _Pairs, heads: int | None
) -> torch.optim.Optimizer:
    moments: dict[str, Any] = {"betas": settings.betas, "eps": settings.eps}
    momentum: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov}
    fused = {"fused": True}
    choices = {"auto": fused, "fused": fused, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    options, lr = choices[settings.implementation], settings.lr
    adapted = {shard: parameter for name, (parameter, shard) in pairs.items() if decays(name)}
    match settings.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, **moments, **options)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, **momentum, **options)
        case "lamb":
            return LAMB(groups, adapted, lr=lr, **moments)
        case "lars":
            return LARS(groups, adapted, lr=lr, **momentum, trust_coefficient=settings.trust_coefficient)
        case "muon":
            shape: dict[str, Any] = {"ns_steps": settings.ns_steps, "adjust_lr_fn": settings.adjust_lr_fn}
            return Muon(groups, _matrices(pairs, heads), lr=lr, **moments, **momentum, **shape)


def _matrices(pairs: _Pairs, heads: int | None) -> dict[Tensor, Matrix]:
    """The matrices of the blocks, by shard: what Muon is for. Stem and head are not hidden layers."""
    matrices: dict[Tensor, Matrix] = {}
    for name, (parameter, shard) in pairs.items():
        if name.startswith("blocks.") and parameter.dim() == 2:
            fused = name.endswith(".attn.qkv.weight")
            assert heads or not fused, f"muon cannot tell queries, keys and values of {name} apart without heads"
            matrices[shard] = Matrix(parameter, heads if fused else None)
    return matrices
