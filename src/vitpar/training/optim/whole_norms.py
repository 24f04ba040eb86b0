"""Norms of whole parameters, from the shards of them that ranks hold."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


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
        norms = [torch.stack([norm.to(self._device) for norm in torch._foreach_norm(shards)]) for shards in values]
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
