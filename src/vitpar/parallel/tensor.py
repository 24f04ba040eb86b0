"""Tensor parallelism: one table that says, for every mode, how a layer's parameters and activations are split.

A layer class declares its modules and parameters in `TENSOR_PARALLEL` (name -> kind). `SPLITS` gives, for each mode and
kind, the placements of weight and bias and the forward. W is stored [out, in], X is [batch, tokens, features]; S(n) =
Shard(n), R = Replicate, P = Partial. The axes are those of the layer's mesh: j, and in 3d j and k. The axes i and d of
2d, 2.5d and 3d split the batch, so they are data-parallel axes (``vitpar.parallel.mesh``): ``fully_shard`` gathers the
weights over i, and no weight collective is written here.

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
  `Split.sums` names these axes, and `TensorSums` sums such gradients once per step.

Parameters are DTensors, so that sharding, gradients and checkpoints know their layout. The arithmetic runs on local
tensors between the explicit collectives of ``vitpar.parallel.collective``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from vitpar.models.vit import Layer
from vitpar.parallel import float8
from vitpar.parallel.collective import (
    all_reduce,
    copy_to_tp_region,
    gather_from_tp_region,
    gathered_linear,
    reduce_from_tp_region,
    reduce_scatter_to_tp_region,
    scatter_to_tp_region,
    split_layer_norm,
)
from vitpar.sharded import to_local
from vitpar.strategy import Strategy


class SplitModule(Protocol):
    """Linear layer or norm whose parameters were split."""

    weight: Tensor
    bias: Tensor
    eps: float
    """Epsilon of a norm."""
    float8: bool
    """Whether the matmul runs in float8. Only set in fp8."""
    tensor_mesh: DeviceMesh
    """Tensor-parallel axes (j, or j and k) of the layer's mesh."""


Forward = Callable[[SplitModule, Tensor], Tensor]


@dataclass(frozen=True)
class Split:
    """Placements of one kind of module or parameter under one mode, and its forward."""

    weight: Mapping[str, Placement] = field(default_factory=dict)
    """Placement of the weight by mesh axis; replicated on axes left out. Also used for a bare parameter."""
    bias: Mapping[str, Placement] = field(default_factory=dict)
    """Placement of the bias by mesh axis; replicated on axes left out."""
    sums: tuple[str, ...] = ()
    """Axes on which the gradients of weight and bias are partial, unless the parameter is split on that axis."""
    forward: Forward | None = None
    """Forward on local tensors; None keeps the module's own."""


def _group(module: SplitModule, axis: str) -> ProcessGroup:
    return module.tensor_mesh.get_group(axis)


def _product(module: SplitModule, x: Tensor, bias: Tensor | None = None) -> Tensor:
    linear = float8.linear if _in_float8(module) else F.linear
    return linear(x, to_local(module.weight), bias)


def _gathered_product(module: SplitModule, x: Tensor, dim: int, axis: str) -> Tensor:
    return gathered_linear(x, to_local(module.weight), dim, _group(module, axis), _in_float8(module))


def _in_float8(module: SplitModule) -> bool:
    return getattr(module, "float8", False)


# The bias is never passed to a matmul whose output is Partial: the reduction would add it once per rank.


def _column(module: SplitModule, x: Tensor) -> Tensor:
    return _product(module, copy_to_tp_region(x, _group(module, "j")), to_local(module.bias))


def _row(module: SplitModule, x: Tensor) -> Tensor:
    return reduce_from_tp_region(_product(module, x), _group(module, "j")) + to_local(module.bias)


def _row_of_whole(module: SplitModule, x: Tensor) -> Tensor:
    return _row(module, scatter_to_tp_region(x, -1, _group(module, "j")))


def _column_of_batch_parts(module: SplitModule, x: Tensor) -> Tensor:
    return _gathered_product(module, x, 0, "j") + to_local(module.bias)


def _row_to_batch_parts(module: SplitModule, x: Tensor) -> Tensor:
    return reduce_scatter_to_tp_region(_product(module, x), _group(module, "j")) + to_local(module.bias)


def _gather_batch(module: SplitModule, x: Tensor) -> Tensor:
    return gather_from_tp_region(x, 0, _group(module, "j"))


def _features(axis: str) -> Forward:
    """Return the forward of a linear with feature-sharded input and output."""

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        return _gathered_product(module, x, -1, axis) + to_local(module.bias)

    return forward


def _features_to_whole(axis: str) -> Forward:
    """Return the forward of a linear with feature-sharded input and replicated output."""

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        return reduce_from_tp_region(_product(module, x), _group(module, axis)) + to_local(module.bias)

    return forward


def _norm(axis: str) -> Forward:
    """Return the forward of a LayerNorm over features sharded on `axis`."""

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        return split_layer_norm(x, to_local(module.weight), to_local(module.bias), module.eps, _group(module, axis))

    return forward


def _on_cube(gathered: str, summed: str) -> Forward:
    """Return the forward of a 3d linear.

    gathered: axis over which the batch is all-gathered before the matmul.
    summed: axis over which the partial products are reduce-scattered along the batch.
    """

    def forward(module: SplitModule, x: Tensor) -> Tensor:
        products = _gathered_product(module, x, 0, gathered)
        return reduce_scatter_to_tp_region(products, _group(module, summed)) + to_local(module.bias)

    return forward


def _own(module: SplitModule, x: Tensor) -> Tensor:
    """Compute this rank's output features; the input is replicated and needs no gradient (the images of embed)."""
    return F.linear(x, to_local(module.weight), to_local(module.bias))


S0, S1, LAST = Shard(0), Shard(1), Shard(-1)
_OF_FEATURES = {
    axis: {
        "norm": Split({axis: S0}, {axis: S0}, forward=_norm(axis)),
        "scale": Split({axis: S0}),
        "token": Split({axis: LAST}),
        "embedding": Split({axis: S0}, {axis: S0}, forward=_own),
        "representation": Split({axis: S0}, {axis: S0}, forward=_features(axis)),
        "classifier": Split({axis: S1}, forward=_features_to_whole(axis)),
    }
    for axis in ("j", "k")
}
_PARTIAL = Split(sums=("j",))
_LINEAR_2D = Split({"j": S0}, {"j": S0}, forward=_features("j"))
SPLITS: dict[str, dict[str, Split]] = {
    "1d": {
        "column": Split({"j": S0}, {"j": S0}, forward=_column),
        "row": Split({"j": S1}, forward=_row),
        "heads": _PARTIAL,
        "classifier": Split({"j": S1}, forward=_row_of_whole),
    },
    "sp": {
        "column": Split({"j": S0}, {"j": S0}, forward=_column_of_batch_parts),
        "row": Split({"j": S1}, sums=("j",), forward=_row_to_batch_parts),
        **dict.fromkeys(("heads", "norm", "scale", "token", "embedding"), _PARTIAL),
        "pooled": Split(forward=_gather_batch),
        "classifier": Split({"j": S1}, forward=_row_of_whole),
    },
    "2d": {"column": _LINEAR_2D, "row": _LINEAR_2D, "heads": _PARTIAL, **_OF_FEATURES["j"]},
    "3d": {
        "column": Split({"j": S0, "k": S1}, {"j": S0}, sums=("k",), forward=_on_cube("j", "k")),
        "row": Split({"j": S1, "k": S0}, {"k": S0}, sums=("j",), forward=_on_cube("k", "j")),
        "heads": Split(sums=("j", "k")),
        **{kind: Split(s.weight, s.bias, ("j",), s.forward) for kind, s in _OF_FEATURES["k"].items()},
    },
}
SPLITS["2.5d"] = SPLITS["2d"]
"""Splits by mode and kind. Kinds that a mode leaves out stay replicated, with complete gradients on every rank."""


def splits_of(strategy: Strategy) -> dict[str, Split]:
    """Return the splits of a layer under `strategy`, by kind."""
    return SPLITS["sp" if strategy.sequence_parallel else strategy.tensor_mode]


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
    """Ranks whose gradients add up to the complete one."""


def apply_tensor_parallel(layer: Layer, strategy: Strategy, mesh: DeviceMesh) -> list[PartialGradient]:
    """Split the parameters of `layer` in place and replace the forwards of its split modules.

    mesh: tensor-parallel axes of the layer's mesh.
    Returns the parameters whose gradients are partial; `TensorSums` must sum them in every step.
    """
    found = []
    splits = splits_of(strategy)
    for name, kind in layer.TENSOR_PARALLEL.items():
        owner, _, attribute = name.rpartition(".")
        holder = layer.get_submodule(owner)
        target = getattr(holder, attribute)
        split = splits.get(kind)
        if split is None or target is None:
            continue
        if isinstance(target, nn.Parameter):
            parts = [(holder, attribute, split.weight)]
        else:
            parts = [(target, part, getattr(split, part)) for part in ("weight", "bias") if hasattr(target, part)]
            if split.forward is not None:
                target.tensor_mesh = mesh
                # A bound method, not functools.partial: layers would hold different partial objects, and the compiler
                # would make a graph for each.
                target.forward = MethodType(split.forward, target)
        for module, part, axes in parts:
            _place(module, part, axes, mesh)
            found += [PartialGradient(module, part, mesh.get_group(axis)) for axis in split.sums if axis not in axes]
    if axis := feature_axis(strategy):
        layer.take_features(mesh.get_local_rank(axis), mesh.shape[(mesh.mesh_dim_names or ()).index(axis)])
    return found


def feature_axis(strategy: Strategy) -> str | None:
    """Return the axis that splits the features of the tokens between layers; None if they are replicated."""
    return {"1d": None, "2d": "j", "2.5d": "j", "3d": "k"}[strategy.tensor_mode]


def _place(module: nn.Module, name: str, axes: Mapping[str, Placement], mesh: DeviceMesh) -> None:
    """Replace a parameter by its DTensor on `mesh`; leave it plain if no axis splits it."""
    if not axes:
        return
    whole = getattr(module, name)
    placements = [axes.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ()]
    placements = [Shard(p.dim % whole.dim()) if isinstance(p, Shard) else p for p in placements]
    # src_data_rank=None: every rank slices its own copy, without a broadcast. The parameters are still on meta.
    setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, placements, src_data_rank=None)))


class TensorSums:
    """Sums of gradients that are partial over tensor-parallel axes: one all-reduce per group, after the last backward.

    upstream: ``to_local()`` gives a gradient the placement of its parameter, so DTensor never reduces the partial
    gradient of a replicated parameter (torchtitan#1805, #2416, #2532, #3412, #4054). These sums replace that reduction,
    in one message per group instead of one per parameter.

    device: device that the groups communicate on. Offloaded gradients are on another one.
    """

    def __init__(self, gradients: Iterable[PartialGradient], device: torch.device) -> None:
        self._device = device
        self._by_group: dict[ProcessGroup, list[PartialGradient]] = {}
        for gradient in gradients:
            self._by_group.setdefault(gradient.group, []).append(gradient)

    @property
    def messages(self) -> list[tuple[ProcessGroup, int]]:
        """Process group and bytes of each all-reduce."""
        parameters = {group: [getattr(p.module, p.name) for p in found] for group, found in self._by_group.items()}
        return [(group, sum(to_local(p).nbytes for p in found)) for group, found in parameters.items()]

    def run(self) -> None:
        """Sum the partial gradients in place.

        Call it after the step's last backward and after the reduction over data-parallel ranks: only then has `.grad`
        of a parameter under ``fully_shard`` its final value.
        """
        for group, partial in self._by_group.items():
            shards = [to_local(getattr(p.module, p.name).grad) for p in partial]
            kinds = {(shard.dtype, shard.device) for shard in shards}
            # A fixed order: ranks that took a set's order could match messages of different dtypes.
            for kind in sorted(kinds, key=str):
                same = [shard for shard in shards if (shard.dtype, shard.device) == kind]
                _add_up(same, group, self._device)


def _add_up(shards: list[Tensor], group: ProcessGroup, device: torch.device) -> None:
    """All-reduce `shards` in place, as one message on `device`."""
    total = all_reduce(torch.cat([shard.flatten() for shard in shards]).to(device), group)
    parts = total.split([shard.numel() for shard in shards])
    torch._foreach_copy_(shards, [part.view_as(shard) for shard, part in zip(shards, parts, strict=True)])
