"""LAMB and LARS, which scale the step of each matrix to the norm of the global matrix, and Lion, which is elementwise.

All work on local shards as plain tensors. Elementwise operations are foreach operations on the shards. Norms are those
of global parameters (`WholeNorms`): one message a step for each process group over which parameters are sharded.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitpar.training.optim.norms import WholeNorms

Group = dict[str, Any]
"""Parameter group of torch.optim: parameters and settings."""


class OverShards(torch.optim.Optimizer):
    """Optimizer over local shards.

    groups: parameter groups, in the order of the model. A parameter has a gradient on all ranks that hold a part of it,
    or on none.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure, which nothing here needs
        """Update all shards that have a gradient. Collective."""
        for group in self.param_groups:
            if shards := [p for p in group["params"] if p.grad is not None]:
                self._update(group, shards)

    def _update(self, group: Group, shards: list[Tensor]) -> None:
        """Update the shards of a group that have a gradient."""
        raise NotImplementedError

    def _remembered(self, shards: Sequence[Tensor], *names: str) -> list[list[Tensor]]:
        """Return the state of each shard, by name: zeros before the first step. `step` is one number per shard."""
        for p in shards:
            if not self.state[p]:
                # Steps are counted on the host, as in torch.
                self.state[p] = {name: torch.zeros(()) if name == "step" else torch.zeros_like(p) for name in names}
        return [[self.state[p][name] for p in shards] for name in names]


def gradients(shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the shards that have one."""
    return [p.grad for p in shards if p.grad is not None]


class Lion(OverShards):
    """Lion over local shards, as timm's without its options. State of each shard: `exp_avg`.

    Settings: `lr`; `betas`, of the average that the sign is taken of, and of the one that is kept; and `weight_decay`,
    which is decoupled.

    Source: "Symbolic Discovery of Optimization Algorithms" (arXiv 2302.06675), algorithm 2.
    """

    def _update(self, group: Group, shards: list[Tensor]) -> None:
        grads, (means,) = gradients(shards), self._remembered(shards, "exp_avg")
        beta1, beta2 = group["betas"]
        directions = list(torch._foreach_lerp(means, grads, 1 - beta1))
        torch._foreach_sign_(directions)
        torch._foreach_mul_(shards, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(shards, directions, alpha=-group["lr"])
        torch._foreach_lerp_(means, grads, 1 - beta2)


class _Layerwise(OverShards):
    """Base of LAMB and LARS, with the step that they share.

    groups: with `weight_decay`.
    adapted: shards whose steps trust ratios scale, each with the parameter of which it is the local part.
    defaults: other settings.
    """

    def __init__(self, groups: list[Group], adapted: Mapping[Tensor, Tensor], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._adapted = [p for group in self.param_groups for p in group["params"] if p in adapted]
        self._norms = WholeNorms([adapted[p] for p in self._adapted]) if self._adapted else None
        # Groups of adapted shards differ only in their learning rates, which trust ratios do not depend on.
        self._settings = next((g for g in self.param_groups if any(p in adapted for p in g["params"])), {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        # One message for all groups: groups with other learning rates would otherwise send one each.
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        groups = [(group, shards) for group, shards in groups if shards]
        if not groups:
            return
        directions, compared = dict[Tensor, Tensor](), dict[Tensor, Tensor]()
        for group, shards in groups:
            scaled, measured = self._directions(group, shards)
            directions |= zip(shards, scaled, strict=True)
            compared |= zip(shards, measured, strict=True)
        if self._norms is not None:
            nothing = next(iter(directions)).new_empty(0)  # keeps messages equally long if gradients are missing
            own, other = self._norms(self._adapted, [compared.get(p, nothing) for p in self._adapted])
            ratios = torch.where((own > 0) & (other > 0), self._trust_ratios(self._settings, own, other), 1.0)
            # Offloaded shards are on the host, norms on the device.
            there = {device: ratios.to(device).unbind() for device in {p.device for p in self._adapted}}
            pairs = [(directions[p], there[p.device][i]) for i, p in enumerate(self._adapted) if p in directions]
            torch._foreach_mul_([direction for direction, _ in pairs], [ratio for _, ratio in pairs])
        for group, shards in groups:
            self._move(group, shards, [directions[p] for p in shards])

    def _directions(self, group: Group, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return two tensors for each shard.

        The first is the direction that trust ratios scale, in separate memory. The norm of the parameter is compared
        with the norm of the second.
        """
        raise NotImplementedError

    def _trust_ratios(self, group: Group, own: Tensor, other: Tensor) -> Tensor:
        """Return the trust ratios, [parameters], by their `own` norms and `other` ones; used if both are above 0."""
        raise NotImplementedError

    def _move(self, group: Group, shards: list[Tensor], directions: list[Tensor]) -> None:
        torch._foreach_add_(shards, directions, alpha=-group["lr"])


class LAMB(_Layerwise):
    """Adam's bias-corrected step plus decoupled weight decay, scaled to the norm of the parameter.

    The trust ratio is ``‖parameter‖ / ‖step‖``, not clamped; 1 if a norm is zero. Settings: `lr`, `betas` and `eps`.
    State of each shard: `step`, `exp_avg`, `exp_avg_sq`.

    Source: "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962), algorithm 2.
    """

    def _directions(self, group: Group, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        grads = gradients(shards)
        steps, means, squares = self._remembered(shards, "step", "exp_avg", "exp_avg_sq")
        beta1, beta2 = group["betas"]
        torch._foreach_add_(steps, 1)
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        times = [step.item() for step in steps]
        roots = torch._foreach_div(squares, [1 - beta2**t for t in times])
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        directions = list(torch._foreach_div(means, [1 - beta1**t for t in times]))
        torch._foreach_div_(directions, roots)
        torch._foreach_add_(directions, shards, alpha=group["weight_decay"])
        return directions, directions

    def _trust_ratios(self, group: Group, own: Tensor, other: Tensor) -> Tensor:
        return own / other


class LARS(_Layerwise):
    """Momentum SGD whose gradient, weight decay included, is scaled to the norm of the parameter.

    The trust ratio is ``trust_coefficient · ‖parameter‖ / (‖gradient‖ + weight_decay · ‖parameter‖)``; 1 if a norm is
    zero. The learning rate is outside the momentum, as in torch.optim.SGD. Settings: `lr`, `momentum`, `nesterov` and
    `trust_coefficient`. State of each shard: `momentum_buffer`; none without momentum.

    Source: "Large Batch Training of Convolutional Networks" (arXiv 1708.03888).
    """

    def _directions(self, group: Group, shards: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        grads = gradients(shards)
        return list(torch._foreach_add(grads, shards, alpha=group["weight_decay"])), grads

    def _trust_ratios(self, group: Group, own: Tensor, other: Tensor) -> Tensor:
        return group["trust_coefficient"] * own / (other + group["weight_decay"] * own)

    def _move(self, group: Group, shards: list[Tensor], directions: list[Tensor]) -> None:
        if group["momentum"]:
            (buffers,) = self._remembered(shards, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, directions)
            if group["nesterov"]:
                torch._foreach_add_(directions, buffers, alpha=group["momentum"])
            else:
                directions = buffers
        super()._move(group, shards, directions)
