"""Tensor parallelism of a layer: its plan applied by torch's ``parallelize_module``, and sums of partial gradients.

``vitpar.parallel.styles`` has the plan. Gradients that are partial (``vitpar.models.roles``) are summed once per step:
with those of replicas, or for layers under ``fully_shard`` by `TensorSums`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from vitpar.models.layers import Layer
from vitpar.models.roles import AXES, parameter_splits
from vitpar.parallel.collective import finish, start_all_reduce
from vitpar.parallel.data import local_gradient
from vitpar.parallel.styles import tensor_parallel_plan
from vitpar.sharded import to_local
from vitpar.strategy import Strategy


@dataclass(frozen=True)
class PartialGradient:
    """Parameter whose gradient is a partial sum on each rank of a group.

    It is identified by module and name, because ``fully_shard`` replaces the parameter object.
    """

    module: nn.Module
    """Module that holds the parameter."""
    name: str
    """Name of the parameter in `module`."""
    group: ProcessGroup
    """Ranks along a tensor-parallel axis whose gradients add up to the complete one."""

    @property
    def parameter(self) -> Tensor:
        """The parameter."""
        parameter: Tensor = getattr(self.module, self.name)
        return parameter


def apply_tensor_parallel(layer: Layer, strategy: Strategy, mesh: DeviceMesh) -> list[PartialGradient]:
    """Split the parameters of `layer` in place and replace the forwards of its split modules.

    mesh: tensor-parallel axes of the layer's mesh.
    Returns the parameters whose gradients are partial; they must be summed in every step.
    """
    plan = tensor_parallel_plan(layer.description, strategy)
    modules = dict(layer.named_modules())
    assert plan.keys() <= modules.keys(), f"no modules {plan.keys() - modules.keys()}"  # torch would only warn
    parallelize_module(layer, mesh, plan, src_data_rank=None)
    for index, divided in enumerate(AXES[strategy.mode].values()):
        if divided == "features":
            layer.take_features(mesh.get_local_rank(index), mesh.size(index))
    layer.take_heads(mesh.get_local_rank(0), mesh.size(0))  # every mode splits heads over j
    partial_gradients = []
    for name, split in parameter_splits(layer.description, strategy.mode).items():
        owner, _, attribute = name.rpartition(".")
        partial_gradients += [PartialGradient(modules[owner], attribute, mesh.get_group(axis)) for axis in split.sums]
    return partial_gradients


class TensorSums:
    """Sums of partial gradients of layers under ``fully_shard``: one all-reduce per set of ranks, after backward.

    upstream: ``to_local()`` gives a gradient the placement of its parameter, so DTensor never reduces the partial
    gradient of a replicated parameter (torchtitan#1805, #2416, #2532, #3412, #4054). These sums replace that reduction,
    in one message instead of one per parameter. Those of other layers are part of the sums over replicas
    (``vitpar.parallel.data.gradient_sums``), which overlap with backward.

    Sums during backward would take a message per layer, because ``fully_shard`` reduces layer by layer. The norm of the
    gradients cannot be in the same message: it needs the sums.

    device: device that the groups communicate on. Offloaded gradients are on another one.
    """

    def __init__(self, gradients: Iterable[PartialGradient], device: torch.device) -> None:
        self._device = device
        # By ranks, not by group: layers of two meshes can have two groups of the same ranks. All ranks of a group see
        # the same layers in the same order, so they choose the same group of those.
        by_ranks: dict[tuple[int, ...], tuple[ProcessGroup, list[PartialGradient]]] = {}
        for gradient in gradients:
            ranks = tuple(get_process_group_ranks(gradient.group))
            by_ranks.setdefault(ranks, (gradient.group, []))[1].append(gradient)
        self._partial = list(by_ranks.values())
        self._running: list[tuple[Tensor, ProcessGroup, list[Tensor]]] = []

    @property
    def messages(self) -> list[tuple[ProcessGroup, int]]:
        """Process group and bytes of each all-reduce."""
        return [(group, sum(to_local(p.parameter).nbytes for p in gradients)) for group, gradients in self._partial]

    def start(self) -> None:
        """Start to sum the partial gradients.

        Call it after the step's last backward and after the reduction over data-parallel ranks: only then has `.grad`
        of a parameter under ``fully_shard`` its final value.
        """
        started: set[tuple[nn.Module, str]] = set()
        for group, partial in self._partial:
            places = {(gradient.module, gradient.name) for gradient in partial}
            if started & places:  # partial along two axes: the second sum adds up the results of the first
                self.wait()
            started |= places
            shards = [local_gradient(p.parameter) for p in partial]
            kinds = {(shard.dtype, shard.device) for shard in shards}
            # A fixed order: ranks that took a set's order could match messages of different dtypes.
            for kind in sorted(kinds, key=str):
                same = [shard for shard in shards if (shard.dtype, shard.device) == kind]
                message = torch.cat([shard.flatten() for shard in same]).to(self._device)
                self._running.append((start_all_reduce(message, group), group, same))

    def wait(self) -> None:
        """Wait until the gradients are the sums."""
        for started, group, shards in self._running:
            parts = finish(started, group).split([shard.numel() for shard in shards])
            torch._foreach_copy_(shards, [part.view_as(shard) for shard, part in zip(shards, parts, strict=True)])
        self._running.clear()
