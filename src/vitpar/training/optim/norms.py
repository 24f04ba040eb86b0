"""Norms of sharded tensors: of all gradients together, with clipping by it, and of each global parameter."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vitpar.launch.world_group import all_reduce_
from vitpar.parallel import ParallelModel
from vitpar.sharded import local, splits


class ShardNorms(NamedTuple):
    """Norms of this rank's shards of some gradients."""

    names: Sequence[str]
    """Names of the parameters."""
    replicas: int
    """Number of ranks that hold each of these shards."""
    norms: Tensor
    """2-norms of the shards, [names]."""


@torch.no_grad()
def shard_norms(gradients: dict[str, Tensor], model: ParallelModel) -> list[ShardNorms]:
    """Return the norms of all gradients on this rank, without those of copies of shared parameters.

    They are float64 if the loss is scaled: squares of large numbers may overflow float32.
    """
    alike: dict[tuple[int, torch.device], dict[str, Tensor]] = {}  # offloaded gradients are on the host
    copies = model.config.shared
    for name, gradient in gradients.items():
        if name in copies:
            continue
        alike.setdefault((model.replicas(gradient), local(gradient).device), {})[name] = local(gradient)
    wide = torch.float64 if model.precision.scales_loss else model.precision.parameters
    return [
        ShardNorms(list(shards), replicas, torch.stack(torch._foreach_norm(list(shards.values()), dtype=wide)))
        for (replicas, _), shards in alike.items()
    ]


@torch.no_grad()
def total_norms(parts: Sequence[Sequence[ShardNorms]], model: ParallelModel, loss: Tensor | None = None) -> Tensor:
    """Return the 2-norm of the gradients of each part of the global model, [parts], equal on every rank. Collective.

    parts: norms of this rank's shards of each part, which may be none.
    loss: this rank's part of the loss. If it is not finite on any rank, the norm is not finite either. None ignores it.

    The square sum of each shard is divided by the number of ranks that hold the same shard. One all-reduce over the
    world then counts every element once, whatever axes shard, replicate or pipeline a parameter.
    """
    wide = torch.float64 if model.precision.scales_loss else model.precision.parameters
    total = torch.zeros(len(parts), device=model.device, dtype=wide)
    for place, shards in enumerate(parts):
        for _, replicas, norms in shards:
            squares = norms.square().sum().to(model.device)
            total[place] += squares / replicas if replicas > 1 else squares
    if loss is not None:
        total += loss * 0  # NaN if the loss is not finite, else 0
    all_reduce_(total)
    return total.sqrt()


def global_norm(gradients: dict[str, Tensor], model: ParallelModel, loss: Tensor | None = None) -> Tensor:
    """Return the 2-norm of these gradients as `total_norms` does, 0-dim. Collective."""
    return total_norms([shard_norms(gradients, model)], model, loss)[0]


@torch.no_grad()
def clip_(gradients: dict[str, Tensor], norm: Tensor, limit: float, scale: float = 1.0) -> None:
    """Divide all gradients by `scale`, and clip them to a norm of at most `limit`.

    Both in one multiplication, and without reading `norm` on the host.

    norm: global norm of the gradients after the division by `scale`.
    limit: 0 for no clipping.
    """
    if (factor := clip_factor(norm, limit, scale)) is not None:
        multiply_(gradients, factor)


def clip_factor(norm: Tensor, limit: float, scale: float = 1.0) -> Tensor | None:
    """Return `clip_`'s factor of gradients, 0-dim on the device of `norm`; None for no clipping."""
    if not limit:
        return None if scale == 1.0 else torch.full_like(norm, 1.0 / scale)
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    return factor / scale if scale != 1.0 else factor


@torch.no_grad()
def multiply_(gradients: dict[str, Tensor], factor: Tensor | float) -> None:
    """Multiply all gradients by `factor`, a number or a 0-dim tensor of any dtype."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients.values():
        by_device.setdefault(local(gradient).device, []).append(local(gradient))
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device, parts[0].dtype) if isinstance(factor, Tensor) else factor)


class WholeNorms:
    """2-norms of tensors that are sharded like `parameters`, counting every element of the global tensor once.

    Square sums of shards are added over exactly the axes that shard a parameter: one all-reduce for each process group,
    for all its parameters together. Ranks with an empty shard take part. All ranks of a group hold the same parameters
    over it. As `parameters` must be in the order of the global model, all ranks reach the groups that they share in one
    order, whatever meshes the layers use.

    parameters: DTensors, or plain tensors, which are global. At least one.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        sharded_over: dict[dist.ProcessGroup, list[int]] = {}
        for index, parameter in enumerate(parameters):
            for group in groups_of_shards(parameter):
                sharded_over.setdefault(group, []).append(index)
        meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
        # Offloaded parameters are elsewhere.
        device = torch.device(meshes[0].device_type) if meshes else parameters[0].device
        self.device = device
        """Device on which the groups communicate, and of the norms."""
        self._messages = [(group, torch.tensor(indices, device=device)) for group, indices in sharded_over.items()]

    def __call__(self, *values: Sequence[Tensor]) -> Tensor:
        """Return the norms, [len(values), parameters], on the meshes' device. Collective.

        They are equal on all ranks that hold a part.

        values: each a list with a local shard, as a plain tensor, for every parameter. An empty tensor adds nothing.
        """
        norms = [torch.stack([norm.to(self.device) for norm in torch._foreach_norm(list(shards))]) for shards in values]
        sums = torch.stack(norms).square()
        for group, indices in self._messages:
            part = sums.index_select(1, indices)
            dist.all_reduce(part, group=group)
            sums.index_copy_(1, indices, part)
        return sums.sqrt()


def add_over_groups_(values: Sequence[tuple[Tensor, Sequence[dist.ProcessGroup]]], device: torch.device) -> None:
    """Add each tensor over its process groups, in place: one all-reduce for each group. Collective.

    values: tensors with their groups, in an order and with groups as `WholeNorms` wants them of parameters.
    device: that on which the groups communicate.
    """
    added_over: dict[dist.ProcessGroup, list[Tensor]] = {}
    for value, groups in values:
        for group in groups:
            added_over.setdefault(group, []).append(value)
    for group, parts in added_over.items():
        message = torch.cat([part.flatten().to(device) for part in parts])
        dist.all_reduce(message, group=group)
        for part, total in zip(parts, message.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


def groups_of_shards(parameter: Tensor, dim: int | None = None) -> list[dist.ProcessGroup]:
    """Return the process groups that shard a parameter: one for each axis of its mesh over which it is split.

    dim: only those that split this dim; may be negative. None for all.
    """
    if not isinstance(parameter, DTensor):
        return []
    mesh, groups = parameter.device_mesh, []
    for axis, placement in enumerate(parameter.placements):
        assert not placement.is_partial(), "a parameter is no partial sum"
        split = not placement.is_replicate() if dim is None else splits(placement, dim % parameter.dim())
        if split and mesh.size(axis) > 1:
            groups.append(mesh.get_group(axis))
    return groups
