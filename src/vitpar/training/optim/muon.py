"""Muon: orthogonalised momentum for the matrices of the blocks; AdamW for every other parameter.

Momentum and AdamW are elementwise and run on local shards. Orthogonalisation is a function of the global matrix. Each
matrix is all-gathered from its shards, one at a time. Every rank that holds a part computes the same result and keeps
its part.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from vitpar.training.optim.layerwise import Group, OverShards, gradients

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic Newton-Schulz iteration."""
_EPS = 1e-7
"""Lower bound of the norm that a matrix is divided by."""


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices with about the same singular vectors and singular values near 1 (0.7 to 1.2 after 5 steps).

    matrices: [..., rows, columns].

    Returns the same shape and dtype. On CUDA the iteration computes in bfloat16, unless `matrices` are float64;
    elsewhere in their own dtype.

    Source: the quintic Newton-Schulz iteration with its coefficients is from Keller Jordan et al., "Muon: An optimizer
    for hidden layers in neural networks" (kellerjordan.github.io/posts/muon).
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices  # the smaller Gram matrix
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)  # the largest singular value is now at most 1
    if x.is_cuda and x.dtype is not torch.float64:
        x = x.bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(OverShards):
    """torch.optim.Muon for the shards in `matrices`, torch.optim.AdamW for all others, with one learning rate.

    State of each shard: `momentum_buffer`, or `step`, `exp_avg` and `exp_avg_sq`.

    groups: with `weight_decay`, which is decoupled.
    matrices: shards to orthogonalise, each with the parameter of which it is the local part, and the rows of each map
        in a group of rows, such as (features, features, features) of the queries, keys and values of a head
        (``vitpar.models.description.Part.stacked``); () for one matrix. These are linear maps that happen to be stored
        as one, with unrelated singular values. Orthogonalised together, the map with the largest gradients would take
        the step of the others.
    defaults: `lr`; `betas` and `eps` of AdamW; `momentum`, `nesterov`, `ns_steps` and `adjust_lr_fn`, the factor of the
        learning rate for a matrix. `original` is √max(1, rows/columns), for a learning rate tuned for Muon.
        `match_rms_adamw` is 0.2·√max(rows, columns), so that steps are as large as AdamW's and its learning rate fits
        all parameters.

    Source of `match_rms_adamw`: "Muon is Scalable for LLM Training" (arXiv 2502.16982).
    """

    def __init__(
        self, groups: list[Group], matrices: Mapping[Tensor, tuple[Tensor, tuple[int, ...]]], defaults: dict[str, Any]
    ) -> None:
        super().__init__(groups, defaults)
        self._matrices = matrices

    def _update(self, group: Group, shards: list[Tensor]) -> None:
        if hidden := [p for p in shards if p in self._matrices]:
            self._muon(group, hidden)
        if others := [p for p in shards if p not in self._matrices]:
            steps, means, squares = self._remembered(others, "step", "exp_avg", "exp_avg_sq")
            adamw(
                others,
                gradients(others),
                means,
                squares,
                [],
                steps,
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _muon(self, group: Group, shards: list[Tensor]) -> None:
        grads, (buffers,) = gradients(shards), self._remembered(shards, "momentum_buffer")
        torch._foreach_lerp_(buffers, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        torch._foreach_mul_(shards, 1 - group["lr"] * group["weight_decay"])
        for p, update in zip(shards, updates, strict=True):
            p.sub_(self._orthogonalised(update, group, *self._matrices[p]), alpha=group["lr"])

    def _orthogonalised(self, shard: Tensor, group: Group, p: Tensor, stacked: tuple[int, ...]) -> Tensor:
        """Return the local shard of the update that orthogonalises the global tensor whose local shard is `shard`.

        Each matrix is multiplied by its factor of the learning rate. Collective.
        """
        if not isinstance(p, DTensor):
            return _orthogonal_maps(shard, group, stacked)
        layout = p.device_mesh, p.placements
        whole = DTensor.from_local(shard, *layout, run_check=False, shape=p.shape, stride=p.stride()).full_tensor()
        # src_data_rank=None: every rank has the global value, so each cuts its own shard without communication.
        part = distribute_tensor(_orthogonal_maps(whole, group, stacked), *layout, src_data_rank=None).to_local()
        assert part.shape == shard.shape, f"a shard of shape {tuple(shard.shape)} is cut as {tuple(part.shape)}"
        return part.to(shard.device)  # offloaded shards are on the host, meshes are not


def _orthogonal_maps(whole: Tensor, group: Group, stacked: tuple[int, ...]) -> Tensor:
    groups = rearrange(whole, "(g r) i -> g r i", r=sum(stacked) or len(whole))
    updates = []
    for part in groups.split(list(stacked) or len(whole), dim=1):
        matrix = part.flatten(0, 1)
        rows, columns = matrix.shape
        original = group["adjust_lr_fn"] == "original"
        factor = math.sqrt(max(1.0, rows / columns)) if original else 0.2 * math.sqrt(max(rows, columns))
        updates.append((factor * orthogonalise(matrix, group["ns_steps"])).unflatten(0, (len(groups), -1)))
    return torch.cat(updates, dim=1).flatten(0, 1)
