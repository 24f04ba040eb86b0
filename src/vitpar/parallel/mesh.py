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
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vitpar.models.config import ModelConfig
from vitpar.strategy import Plan, Strategy, rank_of_place
from vitpar.strategy.layout import joined_index, mesh_axes, place, replicating_axes, sharding_axes
from vitpar.strategy.stages import sharing_places


def pipeline_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """Return the mesh (pp, stage) over the complete world. Collective over all ranks."""
    return _mesh(_ranks(plan), ("pp", "stage"), device_type)


def layer_mesh(plan: Plan, strategy: Strategy, device_type: str) -> DeviceMesh:
    """Return the mesh, over the complete world, of the layers that have `strategy`.

    Collective: all ranks must call it for the same strategies in the same order, because it creates process groups.
    """
    sizes = dict(mesh_axes(strategy))
    names = {"replicate": replicating_axes(strategy), "shard": sharding_axes(strategy), "j": ("j",), "k": ("k",)}
    names = {axis: tuple(name for name in parts if name in sizes) for axis, parts in names.items()}
    shape = {axis: math.prod(sizes[name] for name in parts) for axis, parts in names.items()}
    kept = [axis for axis in shape if shape[axis] > 1 or axis == "shard"]
    order = [name for parts in names.values() for name in parts]
    stage = _ranks(plan)
    ranks = torch.empty_like(stage)
    ranks[:, [joined_index(order, place(strategy, rank), sizes)[0] for rank in range(plan.stage_size)]] = stage
    ranks = ranks.view(-1, *(shape[axis] for axis in kept))
    if plan.pp == 1:
        return _mesh(ranks[0], tuple(kept), device_type)
    return _mesh(ranks, ("pp", *kept), device_type)


def sharing_meshes(config: ModelConfig, plan: Plan, device_type: str) -> dict[str, DeviceMesh | None]:
    """Return a mesh (shared, stage) of the stages that hold each shared parameter, by the owner's name.

    None for a parameter within one pipeline rank. Collective over all ranks. Tables are left out.
    """
    return {
        owner: _mesh(_ranks(plan)[list(places)], ("shared", "stage"), device_type) if len(places) > 1 else None
        for owner, places in sharing_places(config, plan).items()
    }


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


def _ranks(plan: Plan) -> Tensor:
    """Return the ranks of the world, indexed by position on the pp axis and rank within the stage."""
    stages = range(plan.pipeline_degree)
    return torch.tensor([[rank_of_place(plan, pp, place) for place in range(plan.stage_size)] for pp in stages])


def _mesh(ranks: Tensor, names: tuple[str, ...], device_type: str) -> DeviceMesh:
    return _cached(tuple(ranks.flatten().tolist()), ranks.shape, names, device_type, dist.group.WORLD)


@cache
def _cached(
    ranks: tuple[int, ...], shape: torch.Size, names: tuple[str, ...], device_type: str, world: dist.ProcessGroup
) -> DeviceMesh:
    # `world` is only a part of the cache key: a mesh is invalid once the process group it was made in is destroyed.
    return DeviceMesh(device_type, torch.tensor(ranks).view(shape), mesh_dim_names=names)
