"""Number of parameter elements that a rank stores, gathers and sums, by arithmetic: without devices or process group.

The numbers come from the tables that the runtime reads: the descriptions of layers, ``parameter_splits`` and the axes
of a layer's mesh.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription
from vitpar.models.roles import chunk_range, parameter_splits
from vitpar.strategy import Plan, Strategy
from vitpar.strategy.layout import mesh_axes, place, sharding_axes


@dataclass(frozen=True)
class LayerElements:
    """Parameter elements of one layer on one rank."""

    local_numel: int
    """Elements that the rank stores."""
    compute_numel: int
    """Elements that the rank computes with: gathered over data axes, still split over tensor axes."""
    tables: int
    """Elements of tables, which every rank keeps complete: counted in both numbers, but never gathered or cast."""
    sums: Mapping[str, int]
    """Elements of partial gradients to be summed once per step over a tensor axis, by axis name."""


def layer_parameters(config: ModelConfig, plan: Plan, stage_rank: int = 0) -> dict[str, int]:
    """Return the parameter elements that a rank stores of each layer, by layer name.

    stage_rank: rank within the stage. Rank 0 stores most: it comes first on every axis of every strategy, and the first
    chunks are the longest.
    """
    strategies = plan.strategies(config.layer_names)
    return {
        name: layer_elements(config.kinds[config.layers[name].kind], strategy, stage_rank).local_numel
        for name, strategy in strategies.items()
    }


@lru_cache(maxsize=2**16)
def layer_elements(
    layer: LayerDescription, strategy: Strategy, stage_rank: int = 0, trained: bool = False
) -> LayerElements:
    """Return the element counts of a layer; `stage_rank` as in `layer_parameters`.

    trained: whether only parameters that are trained count.
    """
    # fully_shard splits the tensor-parallel part along dim 0; all its axes together number the shard.
    sizes, at = dict(mesh_axes(strategy)), place(strategy, stage_rank)
    shard, shards = 0, 1
    for axis in sharding_axes(strategy):
        shard, shards = shard * sizes[axis] + at[axis], shards * sizes[axis]
    local_numel, compute_numel, tables, sums = 0, 0, 0, Counter[str]()
    for split in parameter_splits(layer, strategy.mode).values():
        if trained and not split.trained:
            continue
        shape = list(split.shape)
        for axis, dim in split.axes.items():
            if axis in sizes:
                shape[dim] = len(chunk_range(shape[dim], sizes[axis], at[axis]))
        whole = math.prod(shape)
        compute_numel += whole
        if split.complete:
            tables += whole
        else:
            shape[0] = len(chunk_range(shape[0], shards, shard))
        local_numel += math.prod(shape)
        if split.trained:
            sums.update({axis: math.prod(shape) for axis in split.sums if axis in sizes})
    return LayerElements(local_numel, compute_numel, tables, dict(sums))
