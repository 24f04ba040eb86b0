"""1-D tensor parallelism: the splits that layers declare, as styles for ``parallelize_module``.

| split                | weight    | input            | output                                |
|----------------------|-----------|------------------|---------------------------------------|
| column               | Shard(0)  | replicated       | features sharded                      |
| row                  | Shard(1)  | features sharded | replicated (one all-reduce)           |
| row_replicated_input | Shard(1)  | replicated       | replicated (one all-reduce)           |
| heads                | Replicate | heads sharded    | heads sharded                         |

Parameters are DTensors, so that sharding, gradients and checkpoints know their layout; the arithmetic runs on local
tensors between two explicit redistributions, because dispatching every operation on DTensors costs more host time than
small layers compute. Parameters that no split names stay whole on every tp rank: their inputs are replicated, so their
gradients are equal there.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module


class _Enter(torch.autograd.Function):
    """A replicated activation into a sharded region: forward nothing, backward the gradients are summed over the ranks.

    As placements: Replicate -> Replicate, its gradient Partial -> Replicate.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """Partial sums out of a sharded region: forward they are summed over the ranks, backward nothing.

    As placements: Partial -> Replicate, its gradient Replicate -> Replicate.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A third of the host time of DTensor.redistribute, which a small model's step would feel.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _slice_features(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """A replicated activation to the local slice of its features; backward the gradient's slices are gathered."""
    whole = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    return whole.redistribute(placements=(Shard(x.dim() - 1),)).to_local()


def _column(module: nn.Linear, x: Tensor) -> Tensor:
    group = module.tensor_mesh.get_group()
    return F.linear(_Enter.apply(x, group), module.weight.to_local(), module.bias.to_local())


def _row(module: nn.Linear, x: Tensor) -> Tensor:
    # The bias after the sum, or it would be added once per rank.
    group = module.tensor_mesh.get_group()
    return _Leave.apply(F.linear(x, module.weight.to_local()), group) + module.bias.to_local()


def _row_replicated_input(module: nn.Linear, x: Tensor) -> Tensor:
    return _row(module, _slice_features(x, module.tensor_mesh))


def _heads(module: nn.LayerNorm, x: Tensor) -> Tensor:
    # Each rank sees only its own heads: its gradient of the shared weight is a partial sum (upstream: titan#1805).
    weight = module.weight.to_local(grad_placements=(Partial(),))
    bias = module.bias.to_local(grad_placements=(Partial(),))
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


class Split(ParallelStyle):
    """A split by name: where the weight and bias go, and the forward on local tensors between them."""

    def __init__(self, weight: Placement, bias: Placement, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self._placements, self._forward = {"weight": weight, "bias": bias}, forward

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, placement in self._placements.items():
            whole = getattr(module, name)
            setattr(module, name, nn.Parameter(distribute_tensor(whole, device_mesh, (placement,), src_data_rank=None)))
        module.tensor_mesh = device_mesh
        # A bound method: over a partial, another object in every layer, the compiler would make a graph for each.
        module.forward = MethodType(self._forward, module)
        return module


SPLITS = {
    "column": Split(Shard(0), Shard(0), _column),
    "row": Split(Shard(1), Replicate(), _row),
    "row_replicated_input": Split(Shard(1), Replicate(), _row_replicated_input),
    "heads": Split(Replicate(), Replicate(), _heads),
}


def apply_tensor_parallel(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Split the parameters of `layer` over the one-axis `mesh` as its class declares."""
    plan = {}
    for name, split in layer.TENSOR_PARALLEL.items():
        owner, _, attribute = name.rpartition(".")
        module = getattr(layer.get_submodule(owner), attribute)
        if module is not None and not isinstance(module, nn.Identity):
            plan[name] = SPLITS[split]
    if plan:
        parallelize_module(layer, mesh, plan)
