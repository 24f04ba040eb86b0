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
from torch import Tensor, nn

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""Value that JSON can express, NaN and the infinities included. Tuples arrive as lists, mappings as dicts."""
_made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Gloo group of the current world, by its default group."""


def cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the group of all ranks that takes CPU tensors: the default group if it does, else a gloo group.

    timeout: of the gloo group's collectives.

    Collective at the first call, which creates that group.
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
    padded, sizes = _padded(mine)
    received = torch.empty(len(sizes), len(padded), dtype=torch.uint8)
    dist.all_gather(list(received), padded, group=cpu_group())
    return [_decoded(message[:size]) for message, size in zip(received, sizes.tolist(), strict=True)]


def gather_json(mine: Json) -> list[Any] | None:
    """Return the value of each rank, in the order of ranks, on rank 0; None elsewhere. Collective."""
    padded, sizes = _padded(mine)
    here = dist.get_rank() == 0
    received = torch.empty(len(sizes) if here else 0, len(padded), dtype=torch.uint8)
    dist.gather(padded, list(received) if here else None, 0, group=cpu_group())
    return [_decoded(row[:size]) for row, size in zip(received, sizes.tolist(), strict=True)] if here else None


def scatter_json(parts: Sequence[Json] | None) -> Any:
    """Return the part that rank 0 sends to this rank. Collective.

    parts: one for each rank, on rank 0; None elsewhere.
    """
    sent = nn.utils.rnn.pad_sequence([*map(_encoded, parts)], batch_first=True) if parts else None
    width = torch.tensor([0 if sent is None else sent.shape[1]])
    dist.broadcast(width, 0, group=cpu_group())
    received = torch.empty(int(width), dtype=torch.uint8)
    dist.scatter(received, None if sent is None else list(sent), 0, group=cpu_group())
    return _decoded(received)


def broadcast_json(mine: Json) -> Any:
    """Return the value of rank 0 on every rank; values of other ranks are ignored. Collective."""
    here = dist.get_rank() == 0
    data = _encoded(mine) if here else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=cpu_group())
    data = data if here else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0, group=cpu_group())
    return _decoded(data)


def _padded(mine: Json) -> tuple[Tensor, Tensor]:
    """Return this rank's message, padded to the longest, and the bytes of every rank's message."""
    data, sizes = _encoded(mine), torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)]), group=cpu_group())
    return nn.functional.pad(data, (0, int(sizes.max()) - len(data))), sizes


def _encoded(value: Json) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")), "ascii"), dtype=torch.uint8)


def _decoded(message: Tensor) -> Any:
    return json.loads(message.numpy().tobytes().rstrip(b"\0"))  # padding


def all_reduce_(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce a device tensor over all ranks, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op)


def broadcast_(tensor: Tensor) -> None:
    """Replace a device tensor by that of rank 0, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, 0)
