"""The true global norm of the gradients, over every axis of the mesh, and clipping by it."""

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.parallel import ParallelModel
from vitpar.train.optimizer import local


@torch.no_grad()
def global_norm(gradients: dict[str, Tensor], model: ParallelModel) -> Tensor:
    """The 2-norm of all gradients of the whole model (0-dim, equal on every rank).

    Each shard's square sum is weighted by one over the ranks that hold the same shard, so one sum over the world counts
    every element once, whatever axes a parameter is sharded, replicated or piped over.
    """
    by_replicas: dict[int, list[Tensor]] = {}
    for gradient in gradients.values():
        by_replicas.setdefault(model.replicas(gradient), []).append(local(gradient))
    total = torch.zeros((), device=model.device, dtype=model.precision.parameters)
    for replicas, shards in by_replicas.items():
        total += torch.stack(torch._foreach_norm(shards)).square().sum() / replicas
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_(gradients: dict[str, Tensor], norm: Tensor, limit: float) -> None:
    """Scale all gradients by ``limit / norm`` where the global `norm` exceeds `limit`, without reading it on the
    host."""
    if gradients:
        torch._foreach_mul_(
            [local(gradient) for gradient in gradients.values()], (limit / (norm + 1e-6)).clamp(max=1.0)
        )
