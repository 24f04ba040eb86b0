"""Norms of sharded tensors: of all gradients together, with clipping by it, and of whole parameters one by one."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitpar.launch.world_group import all_reduce_
from vitpar.parallel import ParallelModel
from vitpar.sharded import local


class ShardNorms(NamedTuple):
    """The 2-norms of this rank's parts of the gradients called `names`, each of which `replicas` ranks hold."""

    names: Sequence[str]
    replicas: int
    norms: Tensor


@torch.no_grad()
def shard_norms(gradients: dict[str, Tensor], model: ParallelModel) -> list[ShardNorms]:
    """Return the norms of all gradients on this rank. In float64 where the loss is scaled: squares of large numbers may
    pass the end of float32."""
    alike: dict[tuple[int, torch.device], dict[str, Tensor]] = {}  # offloaded gradients are on the host
    for name, gradient in gradients.items():
        alike.setdefault((model.replicas(gradient), local(gradient).device), {})[name] = local(gradient)
    wide = torch.float64 if model.precision.scales_loss else model.precision.parameters
    return [
        ShardNorms(list(shards), replicas, torch.stack(torch._foreach_norm(list(shards.values()), dtype=wide)))
        for (replicas, _), shards in alike.items()
    ]


@torch.no_grad()
def total_norm(parts: Sequence[ShardNorms], model: ParallelModel, loss: Tensor | None = None) -> Tensor:
    """The 2-norm of all gradients of the whole model (0-dim, equal on every rank), from those of their parts.

    Each shard's square sum is weighted by one over the ranks that hold the same shard, so one sum over the world counts
    every element once, whatever axes a parameter is sharded, replicated or piped over.

    loss: this rank's part of it; the norm is then not finite where that is not, on any rank.
    """
    wide = torch.float64 if model.precision.scales_loss else model.precision.parameters
    total = torch.zeros((), device=model.device, dtype=wide)
    for _, replicas, norms in parts:
        squares = norms.square().sum().to(model.device)
        total += squares / replicas if replicas > 1 else squares
    if loss is not None:
        total += loss * 0  # NaN where the loss is not finite, else nothing
    all_reduce_(total)
    return total.sqrt()


def global_norm(gradients: dict[str, Tensor], model: ParallelModel, loss: Tensor | None = None) -> Tensor:
    """`total_norm` of these gradients."""
    return total_norm(shard_norms(gradients, model), model, loss)


@torch.no_grad()
def clip_(gradients: dict[str, Tensor], norm: Tensor, limit: float, scale: float = 1.0) -> None:
    """Divide all gradients by `scale`, and by ``norm / limit`` where the global `norm` (after the first division)
    exceeds `limit`: both at once, and without reading `norm` on the host. limit: 0 for none."""
    factor: Tensor | float = (limit / (norm + 1e-6)).clamp(max=1.0) if limit else 1.0
    multiply_(gradients, factor / scale if scale != 1.0 else factor)


@torch.no_grad()
def multiply_(gradients: dict[str, Tensor], factor: Tensor | float) -> None:
    """All gradients times `factor` (0-dim, of any dtype)."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients.values():
        by_device.setdefault(local(gradient).device, []).append(local(gradient))
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device, parts[0].dtype) if isinstance(factor, Tensor) else factor)


class WholeNorms:
    """2-norms of tensors that are sharded as `parameters` are, counting every element of the whole tensor once.

    Square sums of shards are added over the axes that a parameter is sharded over, and over no other: one all-reduce
    for each process group, for all its parameters together. Ranks with an empty shard take part. All ranks of a group
    hold the same parameters over it, so where `parameters` stand in the order of the whole model, as they must, all
    ranks come to the groups they share in one order, whatever meshes the layers live on.

    parameters: DTensors, or plain tensors, which are whole. At least one.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        sharded_over: dict[dist.ProcessGroup, list[int]] = {}
        for index, parameter in enumerate(parameters):
            for group in _groups_of_shards(parameter):
                sharded_over.setdefault(group, []).append(index)
        meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
        # Where groups can send, which is not where offloaded parameters are.
        device = torch.device(meshes[0].device_type) if meshes else parameters[0].device
        self._device = device
        self._messages = [(group, torch.tensor(indices, device=device)) for group, indices in sharded_over.items()]

    def __call__(self, *values: Sequence[Tensor]) -> Tensor:
        """The norms, [len(values), parameters], equal on all ranks that hold a part, on the meshes' device. Collective.

        values: each a list with a local shard, as a plain tensor, for every parameter; an empty tensor adds nothing.
        """
        norms = [
            torch.stack([norm.to(self._device) for norm in torch._foreach_norm(list(shards))]) for shards in values
        ]
        sums = torch.stack(norms).square()
        for group, indices in self._messages:
            part = sums.index_select(1, indices)
            dist.all_reduce(part, group=group)
            sums.index_copy_(1, indices, part)
        return sums.sqrt()


def _groups_of_shards(parameter: Tensor) -> list[dist.ProcessGroup]:
    """The process groups over whose ranks the parameter is split, one for each such axis of its mesh."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, groups = parameter.device_mesh, []
    for axis, placement in enumerate(parameter.placements):
        assert not placement.is_partial(), "a parameter is no partial sum"
        if not placement.is_replicate() and mesh.size(axis) > 1:  # strided shards do not call themselves shards
            groups.append(mesh.get_group(axis))
    return groups
