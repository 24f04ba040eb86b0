"""Adafactor: steps scaled by a second moment of which only means over rows and over columns are kept.

The means, and the root mean squares of parameters and updates, are those of global parameters. Sums over a dim of local
shards are added over the process groups that split this dim. A step sends three messages for each process group over
which parameters are sharded: sums over columns and rows, means of the former, and norms.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vitpar.training.optim.layerwise import Group, OverShards
from vitpar.training.optim.norms import WholeNorms, add_over_groups_, groups_of_shards

FACTORS = {"row_var": -1, "col_var": -2}
"""Dim over which each factor of the second moment is a mean, by its name in the state."""
_BETA2_DECAY = -0.8
"""Power of the step that the newest gradient weighs in the second moment."""
_LEAST_RMS = 1e-3
"""Lower bound of the root mean square of a parameter, to which its step is relative."""
_MOST_RMS = 1.0
"""Root mean square of an update to which larger ones are scaled down."""


class Adafactor(OverShards):
    """torch.optim.Adafactor with its default settings, over local shards.

    State of each shard: `step`, and `row_var` and `col_var`, or `variance` for a parameter with fewer than two dims.
    Gradients are overwritten by updates, which saves memory.

    groups: with `weight_decay`, which is decoupled.
    parameters: parameter of which a shard is the local part, by shard.

    Source: "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235), with the changes that
    torch.optim.Adafactor documents.
    """

    def __init__(self, groups: list[Group], parameters: Mapping[Tensor, Tensor], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self._shards = [p for group in self.param_groups for p in group["params"]]
        self._shapes = {p: parameters[p].shape for p in self._shards}
        self._splitting = {
            (p, dim): groups_of_shards(parameters[p], dim)
            for p in self._shards
            for dim in FACTORS.values()
            if p.dim() > 1
        }
        if self._shards:
            self._norms = WholeNorms([parameters[p] for p in self._shards])
            roots = [parameters[p].numel() ** 0.5 for p in self._shards]
            self._roots = torch.tensor(roots, dtype=self._shards[0].dtype, device=self._norms.device)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        # Messages are for all parameter groups together.
        groups = {p: group for group in self.param_groups for p in group["params"] if p.grad is not None}
        if not groups:
            return
        shards = list(groups)
        for p in shards:
            # Steps are counted on the host, as in torch.
            self.state[p].setdefault("step", torch.zeros(())).add_(1)
        times = {p: self.state[p]["step"].item() for p in shards}
        updates = self._updates({p: t**_BETA2_DECAY for p, t in times.items()})
        nothing = shards[0].new_empty(0)  # keeps messages equally long if gradients are missing
        own, moved = self._norms(self._shards, [updates.get(p, nothing) for p in self._shards]) / self._roots
        scales = own.clamp(min=_LEAST_RMS) / (moved / _MOST_RMS).clamp(min=1.0)
        # Offloaded shards are on the host, norms on the device.
        there = {device: scales.to(device).unbind() for device in {p.device for p in shards}}
        steps = list(updates.values())
        torch._foreach_mul_(steps, [there[p.device][i] for i, p in enumerate(self._shards) if p in groups])
        torch._foreach_mul_(steps, [-min(group["lr"], times[p] ** -0.5) for p, group in groups.items()])
        torch._foreach_mul_(shards, [1 - group["lr"] * group["weight_decay"] for group in groups.values()])
        torch._foreach_add_(shards, steps)

    def _updates(self, newest: Mapping[Tensor, float]) -> dict[Tensor, Tensor]:
        """Return the gradients divided by the roots of their second moments, which are updated. Collective.

        newest: weight of the newest gradient in the second moment, by shard. The order is that of the result.
        """
        grads = {p: p.grad for p in newest if p.grad is not None}
        matrices = [p for p in grads if p.dim() > 1]
        sums = [
            (p, dim, name, torch.linalg.vector_norm(grads[p], dim=dim, keepdim=True).square_())
            for p in matrices
            for name, dim in FACTORS.items()
        ]
        self._add_shards((total, p, dim) for p, dim, _, total in sums)
        for p, dim, name, total in sums:
            factor = self.state[p].setdefault(name, torch.zeros_like(total))
            factor.lerp_(total.div_(self._shapes[p][dim]), newest[p])
        means = {p: self.state[p]["row_var"].sum(dim=-2, keepdim=True) for p in matrices}
        self._add_shards((total, p, -2) for p, total in means.items())
        for p, grad in grads.items():
            state, eps = self.state[p], torch.finfo(p.dtype).eps
            if p in means:
                mean = means[p].div_(self._shapes[p][-2]).clamp_(min=eps)
                estimate = (state["row_var"] * state["col_var"]).div_(mean)
            else:
                estimate = state.setdefault("variance", torch.zeros_like(p)).lerp_(grad.square(), newest[p]).clone()
            grad.mul_(estimate.clamp_(min=eps * eps).rsqrt_())
        return grads

    def _add_shards(self, sums: Iterable[tuple[Tensor, Tensor, int]]) -> None:
        """Add sums over dims of local shards up to those of parameters. Collective. sums: with shard and dim."""
        add_over_groups_([(total, self._splitting[p, dim]) for total, p, dim in sums], self._norms.device)
