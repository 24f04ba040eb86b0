"""The device mesh of a plan.

The mesh always has the four axes (pp, dp, fsdp, tp), those of degree 1 included, so that every part of the runtime
finds its axis by name. The order of the strategy string decides which ranks are neighbours along which axis: in
``pp2xdp2xtp2`` the ranks of a tp group are consecutive, in ``pp2xtp2xdp2`` they are strided. Meshes are made once and
cached: two views over the same ranks count as different meshes to PyTorch.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vitpar.strategy.plan import ROLES, Axis, Plan


def build_mesh(plan: Plan, device_type: str) -> DeviceMesh:
    """The mesh of a uniform plan over the whole world. All ranks must call it."""
    return _mesh(plan.axes, device_type, dist.group.WORLD)


@cache
def _mesh(axes: tuple[Axis, ...], device_type: str, world: dist.ProcessGroup) -> DeviceMesh:
    # `world` is part of the key: a mesh dies with the world it was made in.
    given = [axis.role for axis in axes]
    shape = [axis.size for axis in axes] + [1] * (len(ROLES) - len(axes))
    order = given + [role for role in ROLES if role not in given]
    count = 1
    for size in shape:
        count *= size
    ranks = torch.arange(count).view(shape).permute([order.index(role) for role in ROLES])
    return DeviceMesh(device_type, ranks, mesh_dim_names=ROLES)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that split the batch, as ``fully_shard`` reads them: one axis shards parameters, two are (replicate,
    shard)."""
    return mesh["fsdp"] if mesh["dp"].size() == 1 else mesh["dp", "fsdp"]
