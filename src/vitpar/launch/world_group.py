"""Collectives over all ranks of the world: on tensors of the device, in place, and on Python objects of the host.

On GPUs the default process group is NCCL's, which takes no CPU tensors. Objects and barriers therefore go through one
gloo group of the same ranks. A group of both backends would not do: DeviceMesh splits its gloo part too
(upstream: pytorch#162424, #182057).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_made: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""The gloo group of the current world, by its default group."""


def cpu_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the group of all ranks that takes CPU tensors and objects: the default group if it does, else one of gloo.

    timeout: of the gloo group's collectives. Collective at the first call, which makes that group.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a default process group"
    if torch.device("cpu") in world._device_types:
        return world
    if world not in _made:
        _made.clear()  # of a world that has ended
        # Not "cpu:gloo": with a device bound to the default group, torch looks for a CUDA backend in the new one too.
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="cpu")
        # It takes over the default group's device, on which its barrier would then make a tensor.
        group.bound_device_id = None
        _made[world] = group
    return _made[world]


def barrier() -> None:
    """Wait until all ranks are here. The devices may still compute."""
    dist.barrier(cpu_group())


def all_gather_object(mine: T) -> list[T]:
    """Return what each rank gives, in the order of ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine, group=cpu_group())
    return everyone


def broadcast_object(mine: T) -> T:
    """Return what rank 0 gives, on every rank."""
    objects = [mine]
    dist.broadcast_object_list(objects, 0, group=cpu_group())
    return objects[0]


def all_reduce_(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """Reduce a tensor of the device over all ranks, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor, op)


def broadcast_(tensor: Tensor) -> None:
    """Replace a tensor of the device by rank 0's, in place. A world of one sends nothing."""
    if dist.get_world_size() > 1:
        dist.broadcast(tensor, 0)
