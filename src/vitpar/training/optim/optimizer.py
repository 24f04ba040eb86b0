"""Optimizers over sharded parameters, and what goes with them: learning rates, averages, the memory that it all needs.

All optimizers run on each rank's local shards as plain tensors: foreach and fused implementations work whatever mix of
meshes the parameters live on, and no elementwise DTensor operation is dispatched in the step. (upstream: foreach and
fused optimizers refuse a mix of DTensors of different meshes.) AdamW and SGD treat every element alone and are torch's
own. LAMB, LARS and Muon depend on whole parameters too: they know of each shard what it is a part of, and send what
they need.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitpar.launch.world_group import all_reduce_
from vitpar.parallel import PRECISIONS, ParallelModel
from vitpar.sharded import local, sharded_as
from vitpar.text import count
from vitpar.training.optim.layerwise import LAMB, LARS
from vitpar.training.optim.muon import Matrix, Muon

if TYPE_CHECKING:
    from vitpar.training.recipe import Recipe
    from vitpar.training.recipe.sections import OptimizerSection

NO_DECAY = (".bias", "norm", "pos_embed", "_token", "gamma")
"""Parts of a parameter's name that exempt it from weight decay."""


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter `name`: matrices only."""
    return not any(part in name for part in NO_DECAY)


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
        """Return the state that is kept from step to step, by `exp_avg.<parameter>` and the like: sharded as the
        parameter is, sharing memory, or a single number. Empty before the first step and `allocate`."""
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
        """Drop the state, as before the first step."""
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
    fused: dict[str, Any] = {"fused": True}
    choices = {"auto": fused, "fused": fused, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    options, lr = choices[settings.implementation], settings.lr
    adapted: dict[Tensor, Tensor] = {shard: parameter for name, (parameter, shard) in pairs.items() if decays(name)}
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


@dataclass(frozen=True)
class CosineWithWarmup:
    """Linear from 0 to `peak` over `warmup_steps`, then half a cosine from `peak` down towards `min_lr`, which
    one step more than `total_steps` would reach."""

    peak: float
    total_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0

    @property
    def warning(self) -> str | None:
        """Warning about a rate that never falls, None for others."""
        if self.warmup_steps < self.total_steps:
            return None
        warmup = count(self.warmup_steps, "step")
        return f"the warm-up of {warmup} is as long as the run or longer: the learning rate never falls"

    def __call__(self, step: int) -> float:
        """The rate of update number `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        progress = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.min_lr + (self.peak - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2


class EMA:
    """An exponential moving average of the parameters, kept shard by shard like the parameters themselves.

    ``average = decay · average + (1 - decay) · parameter`` after every step.

    The average starts as the initial parameters. `averaged` puts it in their place for a while, for evaluation and
    saving. warmup: whether the decay rises from 0 to `decay`, so that initial parameters are forgotten at once.
    """

    def __init__(self, model: ParallelModel, decay: float, warmup: bool = False) -> None:
        self._model, self._decay, self._warmup = model, decay, warmup
        self._shards = {name: local(p.detach()) for name, p in model.named_parameters()}
        self.average = {name: shard.clone() for name, shard in self._shards.items()}

    @torch.no_grad()
    def restart(self) -> None:
        """Begin with the parameters as they are."""
        torch._foreach_copy_(list(self.average.values()), list(self._shards.values()))

    def decay(self, step: int) -> float:
        """Return the decay after update number `step`, counted from 1.

        With a warm-up 1 - step^(-2/3), at most the decay that was asked for, as in timm's ModelEmaV3.
        """
        return min(self._decay, 1 - step ** (-2 / 3)) if self._warmup else self._decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the present parameters into the average, after update number `step`, counted from 1."""
        torch._foreach_lerp_(list(self.average.values()), list(self._shards.values()), 1.0 - self.decay(step))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the averaged parameters inside the ``with``, with its own again after it."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, shard in self._shards.items():
            kept = shard.clone()
            shard.copy_(self.average[name])
            self.average[name].copy_(kept)
        self._model.parameters_changed()


def state_bytes(recipe: Recipe) -> int:
    """Bytes kept for each element of a rank's parameters: the copies that `state_words` names.

    Muon keeps less for some elements than for others: this is what it keeps at most.
    """
    return (2 + moments(recipe)) * PRECISIONS[recipe.train.precision].parameters.itemsize


def state_size(model: ParallelModel, recipe: Recipe) -> tuple[int, int]:
    """Parameters of the whole model, and the bytes that the fullest rank keeps for its share (`state_bytes`)."""
    named = [p for _, p in model.named_parameters()]
    whole = torch.tensor(
        [sum(local(p).numel() / model.replicas(p) for p in named)], dtype=torch.float64, device=model.device
    )
    fullest = torch.tensor([float(sum(local(p).numel() for p in named))], dtype=torch.float64, device=model.device)
    all_reduce_(whole)
    all_reduce_(fullest, dist.ReduceOp.MAX)
    return round(whole.item()), int(fullest.item()) * state_bytes(recipe)


def moments(recipe: Recipe) -> int:
    """Copies of the parameters' size that are kept besides parameters and gradients: the optimizer's, and the running
    average."""
    return _moments(recipe) + bool(recipe.train.ema_decay)


def state_words(recipe: Recipe) -> str:
    """Name the contents of these bytes: `parameters, gradients, adamw state in float32`."""
    kinds = ["parameters", "gradients"]
    if _moments(recipe):
        kinds.append(f"{recipe.optimizer.name} state{' (at most)' if recipe.optimizer.name == 'muon' else ''}")
    if recipe.train.ema_decay:
        kinds.append("running average")
    number = str(PRECISIONS[recipe.train.precision].parameters).removeprefix("torch.")
    return f"{', '.join(kinds)} in {number}"


def _moments(recipe: Recipe) -> int:
    """Numbers the optimizer remembers for each element, at most: muon's are 1 for matrices of blocks, 2 for others."""
    momentum = 1 if recipe.optimizer.momentum else 0
    return {"adamw": 2, "lamb": 2, "muon": 2, "sgd": momentum, "lars": momentum}[recipe.optimizer.name]
