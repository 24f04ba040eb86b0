"""Tensor parallelism: how each mode computes a layer whose parameters are split.

A layer's description names its modules and parameters with their roles. ``vitpar.strategy.splits`` says, for each mode
and role, how weight and bias are split, and `FORWARDS` here how the module then computes. W is stored [out, in], X is
[batch, tokens, features]; S(n) = Shard(n), R = Replicate, P = Partial. The axes are those of the layer's mesh: j, and
in 3d j and k. The axes i and d of 2d, 2.5d and 3d split the batch, so they are data-parallel axes
(``vitpar.parallel.mesh``): ``fully_shard`` gathers the weights over i, and no weight collective is written here.

| mode    | linear | X      | W      | before the matmul   | Y      | after the matmul    | X of the next  |
|---------|--------|--------|--------|---------------------|--------|---------------------|----------------|
| 1d      | column | R      | S0     | (backward: sum)     | S2     |                     | S2             |
| 1d      | row    | S2     | S1     |                     | P      | all-reduce          | R              |
| 1d +sp  | column | S0     | S0     | gather batch        | S2     |                     | S2             |
| 1d +sp  | row    | S2     | S1     |                     | P      | reduce-scatter      | S0             |
| 2d 2.5d | both   | S2     | S0     | gather features     | S2     |                     | S2             |
| 3d j, k | column | S0, S2 | S0, S1 | gather batch over j | S2, P  | reduce-scatter on k | S2, S0         |
| 3d j, k | row    | S2, S0 | S1, S0 | gather batch over k | P, S2  | reduce-scatter on j | S0, S2         |

- Sequence parallelism (+sp) splits the batch, not the tokens. The traffic is the same, and ViT-B/16 has 197 tokens, a
  prime. (upstream: uneven token shards are broken in SequenceParallel, torchtitan#1306, pytorch#150336.)
- Norms of split features all-reduce their statistics: DTensor's ``layer_norm`` would all-gather the features.
- Biases are added after the reduction; on a Partial output every rank would add them once.
- If a parameter is replicated along an axis whose ranks see different samples or heads, its gradient is partial there.
  `ParameterSplit.sums` names these axes, and such gradients are summed once per step: with those of replicas, or for
  layers under ``fully_shard`` by `TensorSums`.

Parameters are DTensors, so that sharding, gradients and checkpoints know their layout. The arithmetic runs on local
tensors between the explicit collectives of ``vitpar.parallel.collective``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vitpar.models.layers import Layer
from vitpar.parallel.collective import (
    finish,
    gather_from_tp_region,
    reduce_from_tp_region,
    reduce_scatter_to_tp_region,
    scatter_to_tp_region,
    split_layer_norm,
    split_rms_norm,
    start_all_reduce,
)
from vitpar.parallel.float8 import Fast
from vitpar.parallel.float8 import linear as float8_linear
from vitpar.parallel.linear import column_linear, gathered_linear
from vitpar.sharded import to_local
from vitpar.strategy import Strategy
from vitpar.strategy.splits import feature_axis, mode_of, parameter_splits


class SplitModule(Protocol):
    """Linear layer or norm whose parameters were split."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    """Epsilon of a norm."""
    float8: Fast
    """Which float8 products are fast. Only set if the layer multiplies in float8."""
    tensor_mesh: DeviceMesh
    """Tensor-parallel axes (j, or j and k) of the layer's mesh."""


Forward = Callable[[SplitModule, Tensor], Tensor]


def _group(module: SplitModule, axis: str) -> ProcessGroup:
    return module.tensor_mesh.get_group(axis)


def _product(module: SplitModule, x: Tensor) -> Tensor:
    weight, in_float8 = to_local(module.weight), _in_float8(module)
    return float8_linear(x, weight, None, in_float8) if in_float8 else F.linear(x, weight)


def _gathered_product(module: SplitModule, x: Tensor, dim: int, axis: str) -> Tensor:
    return gathered_linear(x, to_local(module.weight), dim, _group(module, axis), _in_float8(module))


def _in_float8(module: SplitModule) -> Fast | None:
    return getattr(module, "float8", None)


# The bias is never passed to a matmul whose output is Partial: the reduction would add it once per rank.


def _plus_bias(module: SplitModule, y: Tensor) -> Tensor:
    return y if module.bias is None else y + to_local(module.bias)


def _column(module: SplitModule, x: Tensor) -> Tensor:
    bias = None if module.bias is None else to_local(module.bias)
    return column_linear(x, to_local(module.weight), bias, _group(module, "j"), _in_float8(module))


def _row(module: SplitModule, x: Tensor) -> Tensor:
    return _plus_bias(module, reduce_from_tp_region(_product(module, x), _group(module, "j")))


def _row_of_whole(module: SplitModule, x: Tensor) -> Tensor:
    return _row(module, scatter_to_tp_region(x, -1, _group(module, "j")))


def _column_of_batch_parts(module: SplitModule, x: Tensor) -> Tensor:
    return _plus_bias(module, _gathered_product(module, x, 0, "j"))


def _row_to_batch_parts(module: SplitModule, x: Tensor) -> Tensor:
    return _plus_bias(module, reduce_scatter_to_tp_region(_product(module, x), _group(module, "j")))


def _gather_batch(module: SplitModule, x: Tensor) -> Tensor:
    return gather_from_tp_region(x, 0, _group(module, "j"))


def _features(axis: str) -> Forward:
    """Return the forward of a linear with feature-sharded input and output."""

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        return _plus_bias(module, _gathered_product(module, x, -1, axis))

    return forward


def _features_to_whole(axis: str) -> Forward:
    """Return the forward of a linear with feature-sharded input and replicated output."""

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        return _plus_bias(module, reduce_from_tp_region(_product(module, x), _group(module, axis)))

    return forward


def _norm(axis: str) -> Forward:
    """Return the forward of a LayerNorm or RMSNorm over features sharded on `axis`."""

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        weight, group, bias = to_local(module.weight), _group(module, axis), getattr(module, "bias", None)
        if bias is None:
            return split_rms_norm(x, weight, module.eps, group)
        return split_layer_norm(x, weight, to_local(bias), module.eps, group)

    return forward


def _on_cube(gathered: str, summed: str) -> Forward:
    """Return the forward of a 3d linear.

    gathered: axis over which the batch is all-gathered before the matmul.
    summed: axis over which the partial products are reduce-scattered along the batch.
    """

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        products = _gathered_product(module, x, 0, gathered)
        return _plus_bias(module, reduce_scatter_to_tp_region(products, _group(module, summed)))

    return forward


def _own(module: SplitModule, x: Tensor) -> Tensor:
    """Compute this rank's output features; the input is replicated and needs no gradient (the images of embed)."""
    return F.linear(x, to_local(module.weight), None if module.bias is None else to_local(module.bias))


def _of_features(axis: str) -> dict[str, Forward]:
    """Return the forwards of roles whose parameters follow the features of the tokens, which `axis` splits."""
    return {
        "norm": _norm(axis),
        "embedding": _own,
        "merge": _features(axis),
        "representation": _features(axis),
        "classifier": _features_to_whole(axis),
    }


FORWARDS: dict[str, dict[str, Forward]] = {
    "1d": {
        "column": _column,
        "row": _row,
        "inner_norm": _norm("j"),
        "merge": _row_of_whole,
        "classifier": _row_of_whole,
    },
    "sp": {
        "column": _column_of_batch_parts,
        "row": _row_to_batch_parts,
        "inner_norm": _norm("j"),
        "pooled": _gather_batch,
        "classifier": _row_of_whole,
    },
    "2d": {"column": _features("j"), "row": _features("j"), "inner_norm": _norm("j"), **_of_features("j")},
    "3d": {
        "column": _on_cube("j", "k"),
        "row": _on_cube("k", "j"),
        "inner_norm": _norm("j"),
        **_of_features("k"),
    },
}
FORWARDS["2.5d"] = FORWARDS["2d"]
"""Forwards by mode and role. Roles that a mode leaves out keep the module's own."""


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
        found: Tensor = getattr(self.module, self.name)
        return found


def apply_tensor_parallel(layer: Layer, strategy: Strategy, mesh: DeviceMesh) -> list[PartialGradient]:
    """Split the parameters of `layer` in place and replace the forwards of its split modules.

    mesh: tensor-parallel axes of the layer's mesh.
    Returns the parameters whose gradients are partial; they must be summed in every step.
    """
    found = []
    forwards, splits = FORWARDS[mode_of(strategy)], parameter_splits(layer.description, strategy)
    for part in layer.description.parts:
        owner, _, attribute = part.name.rpartition(".")
        target = getattr(layer.get_submodule(owner), attribute)
        if (forward := forwards.get(part.role)) is not None:
            target.tensor_mesh = mesh
            # A bound method, not functools.partial: layers would hold different partial objects, and the compiler
            # would make a graph for each.
            target.forward = MethodType(forward, target)
    for name, split in splits.items():
        owner, _, attribute = name.rpartition(".")
        module = layer.get_submodule(owner)
        _place(module, attribute, split.axes, mesh)
        found += [PartialGradient(module, attribute, mesh.get_group(axis)) for axis in split.sums]
    if axis := feature_axis(strategy):
        layer.take_features(mesh.get_local_rank(axis), mesh.shape[(mesh.mesh_dim_names or ()).index(axis)])
    return found


def _place(module: nn.Module, name: str, axes: Mapping[str, int], mesh: DeviceMesh) -> None:
    """Replace a parameter by its DTensor on `mesh`; leave it plain if no axis splits it."""
    if not axes:
        return
    whole = getattr(module, name)
    placements = [Shard(axes[axis]) if axis in axes else Replicate() for axis in mesh.mesh_dim_names or ()]
    # src_data_rank=None: every rank slices its own copy, without a broadcast. The parameters are still on meta.
    setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


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
        return [(group, sum(to_local(p.parameter).nbytes for p in found)) for group, found in self._partial]

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
            gradients = [gradient for p in partial if (gradient := p.parameter.grad) is not None]
            assert len(gradients) == len(partial), "not every parameter has a gradient"
            shards = [to_local(gradient) for gradient in gradients]
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
