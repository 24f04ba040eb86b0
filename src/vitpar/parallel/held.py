"""How many elements of a model's parameters a rank keeps, by arithmetic alone: needs no devices and no process group.

The numbers come from the tables that the runtime reads: the layer classes' `TENSOR_PARALLEL`, ``splits_of`` and the
axes of a layer's mesh, on parameters of the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import Placement, Shard

from vitpar.models.config import ViTConfig
from vitpar.models.vit import ViT
from vitpar.parallel.tensor import splits_of
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, place, sharding_axes


def layer_parameters(config: ViTConfig, plan: Plan, stage_rank: int = 0) -> dict[str, int]:
    """How many elements of each layer's parameters a rank of its stage keeps, by the layer's name.

    stage_rank: its number within the stage. Rank 0 is the fullest: it stands first on every axis of every strategy, and
    first parts are the longest.
    """
    with torch.device("meta"):
        model = ViT(config, ("stem", "blocks.0", "head"))  # the blocks are alike
    kinds, held = model.layers(), {}
    found: dict[tuple[str, Strategy], int] = {}
    for name, strategy in plan.strategies(config.layer_names).items():
        key = ("blocks.0" if name.startswith("blocks.") else name, strategy)
        if key not in found:
            found[key] = _elements(kinds[key[0]], strategy, stage_rank)
        held[name] = found[key]
    return held


def chunk_length(length: int, parts: int, index: int) -> int:
    """The length of part `index` of `parts`, as torch.chunk deals them: full ones first, the last may be empty."""
    full = -(-length // parts)
    return max(0, min(full, length - index * full))


def _elements(layer: nn.Module, strategy: Strategy, stage_rank: int) -> int:
    """The elements of `layer` that a rank keeps: split over the tensor axes, then sharded along dim 0."""
    sizes, at = dict(mesh_axes(strategy)), place(strategy, stage_rank)
    shard, shards = 0, 1
    for axis in sharding_axes(strategy):
        shard, shards = shard * sizes[axis] + at[axis], shards * sizes[axis]
    total = 0
    for name, parameter in layer.named_parameters():
        shape = list(parameter.shape)
        for axis, placement in _splits(layer, name, strategy).items():
            if axis in sizes and isinstance(placement, Shard):
                dim = placement.dim % len(shape)
                shape[dim] = chunk_length(shape[dim], sizes[axis], at[axis])
        shape[0] = chunk_length(shape[0], shards, shard)
        total += torch.Size(shape).numel()
    return total


def _splits(layer: nn.Module, name: str, strategy: Strategy) -> Mapping[str, Placement]:
    """The tensor axes that split a parameter, and how. A layer class declares parameters, or modules that hold them."""
    declared, owner = layer.TENSOR_PARALLEL, name.rpartition(".")[0]
    split = splits_of(strategy).get(declared.get(name) or declared.get(owner, ""))
    if split is None:
        return {}
    return split.bias if name not in declared and name.endswith(".bias") else split.weight
