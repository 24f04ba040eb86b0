"""Which rank writes which part of a checkpoint's tensors, of which several may hold the same part:
torch.distributed.checkpoint (DCP) decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from vitpar.checkpoint.index import StoredTensor
from vitpar.launch.world_group import cpu_group


def agreed(tensors: Mapping[str, Tensor]) -> tuple[list[str], dict[str, StoredTensor]]:
    """The names of those of `tensors` of which this rank writes its part, and, on rank 0, what the index says of all
    tensors. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=rank == 0)
    everyone: list[Any] = [None] * world
    dist.gather_object(planner.create_local_plan(), everyone if rank == 0 else None, group=cpu_group())
    plans: list[Any] = [None] * world
    stored: dict[str, StoredTensor] = {}
    if rank == 0:
        plans, metadata = planner.create_global_plan(everyone)
        stored = _stored(plans, metadata.state_dict_metadata)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, plans if rank == 0 else None, group=cpu_group())
    return [item.index.fqn for item in planner.finish_plan(mine[0]).items], stored


def shard_name(rank: int, world: int) -> str:
    """The file that `rank` of `world` writes."""
    return f"shard-{rank + 1:05d}-of-{world:05d}.safetensors"


def _stored(plans: list[SavePlan], metadata: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """What the index says of the tensors, from what each rank writes."""
    writing = [rank for rank, plan in enumerate(plans) if plan.items]
    tensors: dict[str, StoredTensor] = {}
    for shard, rank in enumerate(writing):
        for item in plans[rank].items:
            name, chunk = item.index.fqn, item.tensor_data.chunk
            whole = metadata[name]
            assert isinstance(whole, TensorStorageMetadata), f"{name} is no tensor"
            dtype: Any = str(whole.properties.dtype).removeprefix("torch.")
            stored = tensors.setdefault(name, StoredTensor(dtype=dtype, shape=tuple(whole.size), parts=[]))
            stored.parts.append((shard, tuple(chunk.offsets), tuple(chunk.sizes)))
    return tensors
