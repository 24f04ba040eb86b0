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

from vitpar.errors import FaultError
from vitpar.limits import MAX_MESSAGE_BYTES

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
    """Return the value of each rank, in the order of ranks. Collective.

    Raises FaultError, on all ranks, for a message that is not JSON or that has more than MAX_MESSAGE_BYTES bytes.
    """
    padded, sizes = _padded(mine)
    received = torch.empty(len(sizes), len(padded), dtype=torch.uint8)
    dist.all_gather(list(received), padded, group=cpu_group())
    return _all_decoded(received, sizes)


def gather_json(mine: Json) -> list[Any] | None:
    """Return the value of each rank, in the order of ranks, on rank 0; None elsewhere. Collective.

    Raises FaultError as `all_gather_json` does.
    """
    padded, sizes = _padded(mine)
    if dist.get_rank() != 0:
        dist.gather(padded, None, 0, group=cpu_group())
        return None
    received = torch.empty(len(sizes), len(padded), dtype=torch.uint8)
    dist.gather(padded, list(received), 0, group=cpu_group())
    return _all_decoded(received, sizes)


def scatter_json(parts: Sequence[Json] | None) -> Any:
    """Return the part that rank 0 sends to this rank. Collective.

    parts: one for each rank, on rank 0; None elsewhere.

    Raises FaultError as `all_gather_json` does.
    """
    world, group = dist.get_world_size(), cpu_group()
    sent = [_encoded(part) for part in parts or ()]
    sizes = torch.tensor([len(part) for part in sent]) if sent else torch.empty(world, dtype=torch.int64)
    dist.broadcast(sizes, 0, group=group)
    _refuse_sizes(sizes)
    padded = torch.zeros(len(sent), int(sizes.max()), dtype=torch.uint8)
    for row, part in zip(padded, sent, strict=True):
        row[: len(part)] = part
    received = torch.empty(padded.shape[1], dtype=torch.uint8)
    dist.scatter(received, list(padded) if sent else None, 0, group=group)
    return _decoded(received[: int(sizes[dist.get_rank()])], 0)


def broadcast_json(mine: Json) -> Any:
    """Return the value of rank 0 on every rank; values of other ranks are ignored. Collective.

    Raises FaultError as `all_gather_json` does.
    """
    group = cpu_group()
    data = _encoded(mine) if dist.get_rank() == 0 else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=group)
    _refuse_sizes(size)
    received = data if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(received, 0, group=group)
    return _decoded(received, 0)


def _padded(mine: Json) -> tuple[Tensor, Tensor]:
    """Return this rank's message, padded to the longest, and the bytes of every rank's message."""
    data, sizes = _encoded(mine), torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(data)]), group=cpu_group())
    _refuse_sizes(sizes)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(data)] = data
    return padded, sizes


def _all_decoded(messages: Tensor, sizes: Tensor) -> list[Any]:
    return [_decoded(message[:size], rank) for rank, (message, size) in enumerate(zip(messages, sizes, strict=True))]


def _encoded(value: Json) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")), "ascii"), dtype=torch.uint8)


def _decoded(message: Tensor, rank: int) -> Any:
    try:
        return json.loads(message.numpy().tobytes())  # accepts half surrogate pairs: names of files that are not UTF-8
    except (ValueError, RecursionError) as error:
        raise FaultError(
            f"rank {rank} sent invalid JSON ({error}): run the same vitpar everywhere, on a trusted network"
        ) from None


def _refuse_sizes(sizes: Tensor) -> None:
    """Refuse messages that are empty or too large, before memory is allocated for them.

    sizes: bytes of each rank's message.
    """
    for rank, size in enumerate(sizes.tolist()):
        if not 0 < size <= MAX_MESSAGE_BYTES:
            raise FaultError(
                f"rank {rank} sent a message of {size:,} bytes, but 1 to {MAX_MESSAGE_BYTES:,} are accepted: run the "
                f"same vitpar everywhere, on a trusted network"
            )


def all_reduce_(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Reduce a device tensor over all ranks, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op)


def broadcast_(tensor: Tensor) -> None:
    """Replace a device tensor by that of rank 0, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, 0)
