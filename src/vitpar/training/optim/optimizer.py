"""Optimizers over sharded parameters.

All optimizers run on each rank's local shards as plain tensors. So foreach and fused implementations work whatever mix
of meshes the parameters have, and the step dispatches no elementwise DTensor operation. (upstream: foreach and fused
optimizers refuse a mix of DTensors of different meshes.) AdamW, Adam and SGD are elementwise and are torch's own; Lion
is elementwise too. LAMB, LARS, Muon and Adafactor also depend on global parameters: they know which parameter a shard
is a part of, and communicate what they need.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitpar.launch.world_group import all_reduce_
from vitpar.parallel import ParallelModel
from vitpar.parallel.precision import LowPrecisionParams
from vitpar.recipe import Recipe
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.sharded import local, mean_sharded_as, sharded_as
from vitpar.strategy.precisions import PRECISION_TYPES
from vitpar.training.optim.adafactor import FACTORS, Adafactor
from vitpar.training.optim.layerwise import LAMB, LARS, Lion
from vitpar.training.optim.muon import Muon
from vitpar.training.optim.one_pass import OnePassAdamW, fits
from vitpar.training.optim.state_memory import state_bytes

ELEMENTWISE = ("adamw", "adam", "sgd", "lion")
"""Optimizers whose updates do not depend on other elements of a parameter."""


def decays(parameter: Tensor) -> bool:
    """Return whether weight decay applies to a parameter: to matrices and convolutions.

    Biases, norms and layer scales have one dimension; tokens, positions and biases of attention scores have three.
    """
    return parameter.dim() in (2, 4)


class ShardedOptimizer:
    """Optimizer over the local shards of named parameters.

    parameters: (name, parameter) pairs of this rank, in the order of the global model. Frozen ones are left out.
    matrices: hidden matrices by name, with the rows of their maps, for muon (``ModelConfig.hidden_matrices``).
    layers_above: number of layers above a parameter, by its name (``ModelConfig.layers_above``), which layer-wise
        decay of the learning rate needs.
    part: part of the model that a parameter belongs to, by its name (``ModelConfig.rate_part``), for `set_rates`.
    implementation: that of the update (``one_pass.choose_implementation``); None for that of the settings.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSection,
        *,
        matrices: Mapping[str, tuple[int, ...]] = {},
        layers_above: Callable[[str], int] | None = None,
        part: Callable[[str], str] = lambda name: "",
        implementation: str | None = None,
    ) -> None:
        # Elementwise optimizers need no empty shards. Others do: ranks with an empty shard take part in the collectives
        # over the global parameter.
        self._pairs = {
            name: (p, nn.Parameter(local(p.detach())))
            for name, p in parameters
            if p.requires_grad and (local(p).numel() or settings.name not in ELEMENTWISE)
        }
        groups = _groups(self._pairs, settings, layers_above, part)
        implementation = implementation or settings.implementation
        self.torch_optimizer = _torch_optimizer(groups, settings, implementation, self._pairs, matrices)
        self.implementation = implementation
        """Implementation of the update: triton, or torch's."""
        if implementation in ("auto", "triton"):
            fused = self.torch_optimizer.defaults.get("fused")
            self.implementation = "triton" if self.one_pass else "fused" if fused else "foreach"
        if self.one_pass:
            for _, shard in self._pairs.values():
                shard.grad_dtype = None  # gradients may have 16 bits

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters with elements here, by name; with optimizers that are not elementwise, empty ones too."""
        return {name: parameter for name, (parameter, _) in self._pairs.items()}

    @property
    def shards(self) -> dict[str, Tensor]:
        """Local parts of `parameters`, as plain tensors that share their memory."""
        return {name: shard for name, (_, shard) in self._pairs.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that exist and have elements here, by parameter name, sharded like the parameters."""
        return {name: p.grad for name, (p, s) in self._pairs.items() if p.grad is not None and s.numel()}

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer state by names such as `exp_avg.<parameter>`.

        A value shares memory. It is sharded like the parameter, Adafactor's means except for the dim that they lack; or
        it is a single number. Empty before the first step or `allocate`.
        """
        tensors = {}
        for name, (parameter, shard) in self._pairs.items():
            for key, value in self.torch_optimizer.state[shard].items():
                if key in FACTORS:
                    value = mean_sharded_as(parameter, value, FACTORS[key])
                elif isinstance(value, Tensor) and value.shape == shard.shape:
                    value = sharded_as(parameter, value)
                if isinstance(value, Tensor):
                    tensors[f"{key}.{name}"] = value
        return tensors

    def allocate(self) -> None:
        """Create the state that the first step would create, to be filled. Collective if `step` is.

        Makes a step with zero gradients and learning rate 0, since the layout of the state is internal to torch's
        optimizers.
        """
        for _, shard in self._pairs.values():
            shard.grad = torch.zeros_like(shard)
        self._update(lr=0.0)

    def forget(self, lacking: Callable[[str], bool] = lambda name: True) -> None:
        """Drop the state of parameters that have a name of `state` which is `lacking`, as before the first step."""
        states = self.torch_optimizer.state
        for name, (_, shard) in self._pairs.items():
            if any(lacking(f"{key}.{name}") for key in states.get(shard, {})):
                del states[shard]

    def skip(self) -> None:
        """Drop the gradients without an update."""
        for parameter, _ in self._pairs.values():
            parameter.grad = None

    def set_weight_decay(self, weight_decay: float) -> None:
        """Set the weight decay of the parameters that have one, from the next update on."""
        for group in self.torch_optimizer.param_groups:
            group["weight_decay"] = weight_decay * group["wd_scale"]

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Multiply the learning rate of parts of the model by `rates`, from the next update on."""
        for group in self.torch_optimizer.param_groups:
            group["rate"] = rates.get(group["part"], 1.0)

    def step(self, lr: float, **beside: Any) -> None:
        """Update with learning rate `lr`, then drop the gradients. Collective for all but elementwise optimizers.

        lr: that of the layers whose learning rate does not decay.
        beside: further work of one pass (``OnePassAdamW.step``).
        """
        for parameter, shard in self._pairs.values():
            shard.grad = None if parameter.grad is None else local(parameter.grad)
        self._update(lr, **beside)

    @property
    def one_pass(self) -> bool:
        """Whether clipping, 16-bit copies and the running average can be part of the update."""
        return isinstance(self.torch_optimizer, OnePassAdamW)

    def step_in_one_pass(
        self,
        lr: float,
        factor: Tensor | None,
        copies: LowPrecisionParams,
        average: tuple[Mapping[str, Tensor], float] | None,
    ) -> None:
        """Run `step` with gradients times `factor`, and write 16-bit copies and averages of the new parameters.

        factor: 0-dim, on the device; None for 1.
        copies: 16-bit copies of the model's parameters.
        average: running averages by name, and their decay; None for no average.
        """
        averages, decay = average or ({}, 0.0)
        updated = {name: pair for name, pair in self._pairs.items() if pair[0].grad is not None}
        targets = {shard: copies.target(parameter) for parameter, shard in updated.values()}
        self.step(
            lr,
            factor=None if factor is None else factor.float(),
            copies={shard: target for shard, target in targets.items() if target is not None},
            averages={shard: averages[name] for name, (_, shard) in updated.items() if name in averages},
            average_decay=decay,
        )
        copies.written(parameter for parameter, _ in updated.values())

    def _update(self, lr: float, **beside: Any) -> None:
        for group in self.torch_optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"] * group["rate"]
        self.torch_optimizer.step(**beside)
        for parameter, shard in self._pairs.values():
            parameter.grad = shard.grad = None


_Pairs = dict[str, tuple[nn.Parameter, nn.Parameter]]
"""Parameter and its local shard, by the parameter's name."""


def _groups(
    pairs: _Pairs, settings: OptimizerSection, layers_above: Callable[[str], int] | None, part: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Return the parameter groups: one for each weight decay, factor of the learning rate and part of the model.

    The factor has timm's key, lr_scale. `wd_scale` is 1 where weight decay applies, else 0.
    """
    members: dict[tuple[bool, int, str], list[nn.Parameter]] = {}
    for name, (parameter, shard) in pairs.items():
        above = 0
        if settings.layer_decay != 1.0:
            assert layers_above is not None, "layer_decay needs the number of layers above a parameter"
            above = layers_above(name)
        members.setdefault((decays(parameter), above, part(name)), []).append(shard)
    if not members:  # a rank whose layers are all frozen: torch refuses to have no group
        members[False, 0, ""] = []
    return [
        {
            "params": members[decay, above, of],
            "weight_decay": settings.weight_decay if decay else 0.0,
            "wd_scale": float(decay),
            "lr_scale": settings.layer_decay**above,
            "part": of,
            "rate": 1.0,
        }
        for decay, above, of in sorted(members, reverse=True)
    ]


def _torch_optimizer(
    groups: list[dict],
    settings: OptimizerSection,
    implementation: str,
    pairs: _Pairs,
    matrices: Mapping[str, tuple[int, ...]],
) -> torch.optim.Optimizer:
    adam: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    momentum: dict[str, Any] = {"lr": settings.lr, "momentum": settings.momentum, "nesterov": settings.nesterov}
    foreach: dict[str, Any] = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}}
    options = foreach.get(implementation, {"fused": True})  # also on a rank whose shards do not fit one pass
    adapted: dict[Tensor, Tensor] = {shard: parameter for parameter, shard in pairs.values() if decays(parameter)}
    match settings.name:
        case "adamw" if implementation == "triton" and fits(shard for _, shard in pairs.values()):
            return OnePassAdamW(groups, adam)
        case "adamw":
            return torch.optim.AdamW(groups, **adam, **options)
        case "adam":
            return torch.optim.Adam(groups, **adam, **options)
        case "sgd":
            return torch.optim.SGD(groups, **momentum, **options)
        case "lion":
            return Lion(groups, {"lr": settings.lr, "betas": settings.betas})
        case "lamb":
            return LAMB(groups, adapted, adam)
        case "lars":
            return LARS(groups, adapted, {**momentum, "trust_coefficient": settings.trust_coefficient})
        case "adafactor":
            return Adafactor(groups, {shard: parameter for parameter, shard in pairs.values()}, lr=settings.lr)
        case "muon":
            hidden: dict[Tensor, tuple[Tensor, tuple[int, ...]]] = {
                pairs[name][1]: (pairs[name][0], rows) for name, rows in matrices.items() if name in pairs
            }
            shape = {"ns_steps": settings.ns_steps, "adjust_lr_fn": settings.adjust_lr_fn}
            return Muon(groups, hidden, {**adam, **momentum, **shape})


def state_size(model: ParallelModel, recipe: Recipe) -> tuple[int, int]:
    """Return the global model's parameters, and the bytes of the fullest rank (`state_bytes`). Collective."""
    copies = model.config.shared
    named = [p for _, p in model.named_parameters()]
    counted = [p for name, p in model.named_parameters() if name not in copies]
    frozen = PRECISION_TYPES[recipe.train.precision].parameters.itemsize
    whole = torch.tensor(
        [sum(local(p).numel() / model.replicas(p) for p in counted)], dtype=torch.float64, device=model.device
    )
    trained = state_bytes(recipe, model.config)
    kept = sum(local(p).numel() * (trained if p.requires_grad else frozen) for p in named)
    fullest = torch.tensor([float(kept)], dtype=torch.float64, device=model.device)
    all_reduce_(whole)
    all_reduce_(fullest, dist.ReduceOp.MAX)
    return round(whole.item()), int(fullest.item())
