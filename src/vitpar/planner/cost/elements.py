"""Number of parameter elements that a rank stores, gathers and sums, by arithmetic: without devices or process group.

The numbers come from the tables that the runtime reads: `TENSOR_PARALLEL` of the layer classes, ``splits_of`` and the
axes of a layer's mesh. Parameters are built on the meta device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch.distributed.tensor import Shard

from vitpar.models.config import ViTConfig
from vitpar.models.vit import Layer, ViT
from vitpar.parallel.tensor import Split, splits_of
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, place, sharding_axes


@dataclass(frozen=True)
class LayerElements:
    """Parameter elements of one layer on one rank."""

    local_numel: int
    """Elements that the rank stores."""
    compute_numel: int
    """Elements that the rank computes with: gathered over data axes, still split over tensor axes."""
    sums: Mapping[str, int]
    """Elements of partial gradients to be summed once per step over a tensor axis, by axis name."""


def layer_parameters(config: ViTConfig, plan: Plan, stage_rank: int = 0) -> dict[str, int]:
    """Return the parameter elements that a rank stores of each layer, by layer name.

    stage_rank: rank within the stage. Rank 0 stores most: it comes first on every axis of every strategy, and the first
    chunks are the longest.
    """
    strategies = plan.strategies(config.layer_names)
    return {
        name: layer_elements(config, name, strategy, stage_rank).local_numel for name, strategy in strategies.items()
    }


def layer_elements(config: ViTConfig, name: str, strategy: Strategy, stage_rank: int = 0) -> LayerElements:
    """Return the element counts of the layer called `name`; `stage_rank` as in `layer_parameters`."""
    kind = "blocks.0" if name.startswith("blocks.") else name  # the blocks are alike
    return _elements(_layers(config)[kind], strategy, stage_rank)


@lru_cache(maxsize=8)
def _layers(config: ViTConfig) -> dict[str, Layer]:
    with torch.device("meta"):
        return ViT(config, ("embed", "blocks.0", "head")).layers()


def chunk_length(length: int, parts: int, index: int) -> int:
    """Return the length of chunk `index` of `parts` as torch.chunk splits: full chunks first, the last may be empty."""
    full = -(-length // parts)
    return max(0, min(full, length - index * full))


@cache
def _elements(layer: Layer, strategy: Strategy, stage_rank: int) -> LayerElements:
    """Return the element counts of a layer, split over tensor axes as the runtime does."""
    # fully_shard splits the tensor-parallel part along dim 0; all its axes together number the shard.
    sizes, at = dict(mesh_axes(strategy)), place(strategy, stage_rank)
    shard, shards = 0, 1
    for axis in sharding_axes(strategy):
        shard, shards = shard * sizes[axis] + at[axis], shards * sizes[axis]
    local_numel, compute_numel, sums = 0, 0, Counter[str]()
    for name, parameter in layer.named_parameters():
        shape, split = list(parameter.shape), _split(layer, name, strategy)
        axes = split.bias if _is_bias(layer, name) else split.weight
        for axis, placement in axes.items():
            if axis in sizes and isinstance(placement, Shard):
                dim = placement.dim % len(shape)
                shape[dim] = chunk_length(shape[dim], sizes[axis], at[axis])
        compute_numel += math.prod(shape)
        shape[0] = chunk_length(shape[0], shards, shard)
        local_numel += math.prod(shape)
        # A parameter that is split over an axis has complete gradients there, and needs no sum.
        for axis in split.sums:
            if axis in sizes and axis not in axes:
                sums[axis] += math.prod(shape)
    return LayerElements(local_numel, compute_numel, dict(sums))


def _split(layer: Layer, name: str, strategy: Strategy) -> Split:
    """Return how a parameter is split. Layer classes declare either the parameter or the module that holds it."""
    declared, owner = layer.TENSOR_PARALLEL, name.rpartition(".")[0]
    return splits_of(strategy).get(declared.get(name) or declared.get(owner, "")) or Split()


def _is_bias(layer: Layer, name: str) -> bool:
    """Return whether the parameter is the bias of a declared module."""
    return name not in layer.TENSOR_PARALLEL and name.endswith(".bias")
