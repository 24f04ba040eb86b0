"""The device meshes of a plan.

One mesh (pp, stage) gives the ranks of each pipeline and of each stage. In addition, every distinct strategy has a mesh
over the complete world with these axes:

| axis      | its ranks hold of a parameter | made of                                    |
|-----------|-------------------------------|--------------------------------------------|
| pp        | other layers                  | pp                                         |
| replicate | copies                        | dp; d of 2.5d                              |
| shard     | shards, gathered for compute  | fsdp; dp with +zero1, +zero2; i of 2d … 3d |
| j, k      | shards, computed with locally | tp of 1d; j of 2d, 2.5d; j and k of 3d     |

Axes of degree 1 are left out, except `shard`, which ``fully_shard`` needs. The order of axes in the strategy string
decides which ranks are neighbours. Meshes are made once and cached: PyTorch treats two meshes over the same ranks as
different.
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
    """Return the mesh (pp, stage) over the complete world. Collective over all ranks."""
    return _mesh(_ranks(plan), ("pp", "stage"), device_type, dist.group.WORLD)


def layer_mesh(plan: Plan, strategy: Strategy, device_type: str) -> DeviceMesh:
    """Return the mesh, over the complete world, of the layers that have `strategy`.

    Collective: all ranks must call it for the same strategies in the same order, because it creates process groups.
    """
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


def stages_mesh(plan: Plan, places: Sequence[int], device_type: str) -> DeviceMesh:
    """Return the mesh (shared, stage) of the ranks at `places` on the pp axis. Collective over all ranks."""
    ranks = _ranks(plan)
    return _mesh(tuple(ranks[pp] for pp in places), ("shared", "stage"), device_type, dist.group.WORLD)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a layer's mesh for ``fully_shard``: (shard), or (replicate, shard), which it takes as HSDP."""
    return mesh["replicate", "shard"] if size(mesh, "replicate") > 1 else mesh["shard"]


def tensor_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the tensor-parallel axes (j, or j and k) of a layer's mesh; None if it has none."""
    axes = tuple(axis for axis in ("j", "k") if size(mesh, axis) > 1)
    return mesh[axes] if axes else None


def partial_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the ranks over which gradients are summed that are partial over j: those along replicate and j.

    Collective at the first call for a layer's mesh with both axes, because it creates process groups.
    """
    if size(mesh, "replicate") == 1:
        return mesh.get_group("j")
    return mesh["replicate", "j"]._flatten().get_group()


def size(mesh: DeviceMesh, axis: str) -> int:
    """Return the degree of an axis, 1 if the mesh leaves it out."""
    names = mesh.mesh_dim_names or ()
    return mesh.shape[names.index(axis)] if axis in names else 1


def _ranks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the world, indexed by position on the pp axis and rank within the stage."""
    return tuple(
        tuple(rank_of_place(plan, pp, number) for number in range(plan.stage_size))
        for pp in range(plan.pipeline_degree)
    )


def _flat(at: dict[str, int], sizes: dict[str, int], names: Sequence[str]) -> int:
    """Return the index along the axes `names` merged into one, the first outermost."""
    index = 0
    for name in names:
        index = index * sizes[name] + at[name]
    return index


def _frozen(ranks: list) -> tuple:
    return tuple(_frozen(part) if isinstance(part, list) else part for part in ranks)


@cache
def _mesh(ranks: tuple, names: tuple[str, ...], device_type: str, world: dist.ProcessGroup) -> DeviceMesh:
    # `world` is only a part of the cache key: a mesh is invalid once the process group it was made in is destroyed.
    return DeviceMesh(device_type, torch.tensor(ranks), mesh_dim_names=names)
