"""Collectives over all ranks of the world: in place on device tensors, and on JSON values of the host.

torch's collectives on Python objects unpickle what they receive, which runs code of the sender. JSON runs nothing.

On GPUs the default process group is NCCL's, which takes no CPU tensors. JSON and barriers therefore use one gloo group
of the same ranks. A group of both backends would not do: DeviceMesh splits its gloo part too (upstream: pytorch#162424,
#182057).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""Value that JSON can express, NaN and the infinities included. Tuples arrive as lists, mappings as dicts."""
_made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Gloo group of the current world, by its default group."""


def cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the group of all ranks that takes CPU tensors: the default group if it does, else a gloo group.

    Collective at the first call, which creates that group. timeout: of its collectives.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a default process group"
    if torch.device("cpu") in world._device_types:
        return world
    if world not in _made:
        _made.clear()  # drop the group of a world that has ended
        # Not "cpu:gloo": with a device bound to the default group, torch looks for a CUDA backend in the new one too.
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="cpu")
        # The new group inherits the default group's device, on which its barrier would then allocate a tensor.
        group.bound_device_id = None
        _made[world] = group
    return _made[world]


def barrier() -> None:
    """Wait until all ranks arrive. Devices may still compute."""
    dist.barrier(cpu_group())


def all_gather_json(mine: Json) -> list[Any]:
    """Return the value of each rank, in the order of ranks. Collective."""
    return _exchange([mine] * dist.get_world_size())


def gather_json(mine: Json) -> list[Any] | None:
    """Return the value of each rank, in the order of ranks, on rank 0; None elsewhere. Collective."""
    everyone = _exchange([mine] + [None] * (dist.get_world_size() - 1))
    return None if dist.get_rank() else everyone


def scatter_json(parts: Sequence[Json] | None) -> Any:
    """Return the part that rank 0 sends to this rank. Collective. parts: one a rank, on rank 0; else None."""
    return _exchange(parts or [None] * dist.get_world_size())[0]


def broadcast_json(mine: Json) -> Any:
    """Return the value of rank 0 on every rank; values of other ranks are ignored. Collective."""
    return scatter_json(None if dist.get_rank() else [mine] * dist.get_world_size())


def _exchange(values: Sequence[Json]) -> list[Any]:
    """Send a value to each rank, and return what each rank sends to this one. Collective."""
    texts = {id(value): json.dumps(value, separators=(",", ":")).encode() for value in values}
    sent = [texts[id(value)] for value in values]
    sizes, incoming = torch.tensor([len(text) for text in sent]), torch.empty(len(sent), dtype=torch.int64)
    dist.all_to_all_single(incoming, sizes, group=cpu_group())
    data = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8)
    received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, data, incoming.tolist(), sizes.tolist(), group=cpu_group())
    return [json.loads(text.numpy().tobytes()) for text in received.split(incoming.tolist())]


def all_reduce_(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce a device tensor over all ranks, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op)


def broadcast_(tensor: Tensor) -> None:
    """Replace a device tensor by that of rank 0, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, 0)
