"""The device meshes of a plan.

One mesh (pp, stage) says which ranks form a pipeline and which form a stage. Beside it every different strategy has a
mesh over the whole world whose axes say what the layer does with its ranks:

| axis      | what its ranks hold of a parameter | made of                                    |
|-----------|------------------------------------|--------------------------------------------|
| pp        | other layers                       | pp                                         |
| replicate | copies                             | dp; d of 2.5d                              |
| shard     | parts, gathered to compute         | fsdp; dp with +zero1, +zero2; i of 2d … 3d |
| j, k      | parts, computed with as they are   | tp of 1d; j of 2d, 2.5d; j and k of 3d     |

Axes of degree 1 are left out, but for `shard`, which ``fully_shard`` needs. The order of the strategy string decides
which ranks are neighbours. Meshes are made once and cached: two over the same ranks count as different to PyTorch.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vitpar.strategy import Plan, Strategy, rank_of_place
from vitpar.strategy.layout import mesh_axes, place, replicating_axes, sharding_axes


def pipeline_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The mesh (pp, stage) over the whole world. All ranks must call it."""
    return _mesh(_ranks(plan), ("pp", "stage"), device_type, dist.group.WORLD)


def layer_mesh(plan: Plan, strategy: Strategy, device_type: str) -> DeviceMesh:
    """The mesh of the layers that have `strategy`, over the whole world. All ranks must call it, for the same
    strategies in the same order."""
    sizes = dict(mesh_axes(strategy))
    names = {"replicate": replicating_axes(strategy), "shard": sharding_axes(strategy), "j": ("j",), "k": ("k",)}
    names = {axis: tuple(name for name in parts if name in sizes) for axis, parts in names.items()}
    shape = {axis: math.prod(sizes[name] for name in parts) for axis, parts in names.items()}
    kept = [axis for axis in shape if shape[axis] > 1 or axis == "shard"]
    ranks = torch.empty(plan.pipeline_degree, *(shape[axis] for axis in kept), dtype=torch.int64)
    for pp, stage in enumerate(_ranks(plan)):
        for stage_rank, rank in enumerate(stage):
            at = place(strategy, stage_rank)
            index = [_flat(at, sizes, names[axis]) for axis in kept]
            ranks[(pp, *index)] = rank
    if plan.pp == 1:
        return _mesh(_frozen(ranks[0].tolist()), tuple(kept), device_type, dist.group.WORLD)
    return _mesh(_frozen(ranks.tolist()), ("pp", *kept), device_type, dist.group.WORLD)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of a layer's mesh that ``fully_shard`` works on: one axis shards parameters, two are (replicate,
    shard)."""
    return mesh["replicate", "shard"] if size(mesh, "replicate") > 1 else mesh["shard"]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axes of a layer's mesh that split its arithmetic, None where there are none."""
    axes = tuple(axis for axis in ("j", "k") if size(mesh, axis) > 1)
    return mesh[axes] if axes else None


def size(mesh: DeviceMesh, axis: str) -> int:
    """The degree of an axis, 1 for one that the mesh leaves out."""
    names = mesh.mesh_dim_names or ()
    return mesh.shape[names.index(axis)] if axis in names else 1


def _ranks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The ranks of the world by place on the pp axis and number within the stage."""
    return tuple(
        tuple(rank_of_place(plan, pp, number) for number in range(plan.stage_size))
        for pp in range(plan.pipeline_degree)
    )


def _flat(at: dict[str, int], sizes: dict[str, int], names: Sequence[str]) -> int:
    index = 0
    for name in names:
        index = index * sizes[name] + at[name]
    return index


def _frozen(ranks: list) -> tuple:
    return tuple(_frozen(part) if isinstance(part, list) else part for part in ranks)


@cache
def _mesh(ranks: tuple, names: tuple[str, ...], device_type: str, world: dist.ProcessGroup) -> DeviceMesh:
    # `world` is part of the key: a mesh dies with the world it was made in.
    return DeviceMesh(device_type, torch.tensor(ranks), mesh_dim_names=names)
