"""Entering and leaving a world: torch.distributed, the GPU of this rank and its share of the cores."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from vitpar.errors import LaunchError
from vitpar.launch.report import finish, reporting
from vitpar.launch.resources import cpu_share, keep_freed_memory
from vitpar.launch.store import MEET_S, meeting_place, roll_call
from vitpar.launch.world import ALONE, Device, World, find_world

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

_undo = ExitStack()
"""Callbacks that restore what `join` and `share_cores` changed: the environment, and torch's number of threads."""


def join(world: World, device: Device, timeout: float = 600.0, store: Store | None = None) -> torch.device:
    """Make this process `world.rank` of `world.size`, and return the device that it computes on.

    Sets torch.distributed's environment variables and default process group, the current GPU, and the number of CPU
    threads (`share_cores`). On a CPU, lets the allocator keep freed memory (`keep_freed_memory`).

    timeout: seconds to wait for other ranks in every collective, and here, but here at most MEET_S.
    store: where the ranks meet, such as a part of a `meeting_place` for each of several worlds in succession. None
    makes one.

    Raises LaunchError if this rank has no GPU, too few open files are allowed, or the ranks cannot meet.
    """
    share_cores(world)

    import torch.distributed as dist

    from vitpar.launch.world_group import cpu_group

    own_device = _own_device(world, device)
    if device == "cpu":
        keep_freed_memory()
    _set_environment(
        {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.local_size),
            "MASTER_ADDR": world.master_addr,
            "MASTER_PORT": str(world.master_port),
        }
    )
    if world.single_machine and "GLOO_SOCKET_IFNAME" not in os.environ:
        # By default gloo looks up the host's name, which may not resolve.
        for name in {"lo", "lo0"}.intersection(name for _, name in socket.if_nameindex()):
            _set_environment({"GLOO_SOCKET_IFNAME": name})
    # In a world of one nothing is sent between GPUs, so NCCL need not start.
    nccl = device == "cuda" and world.size > 1
    limit = timedelta(seconds=timeout)
    dist.set_debug_level_from_env()  # torch read it when it was imported
    # A world of one needs no network: no port can be in use, and no firewall in the way.
    store = store or meeting_place(world, min(timeout, MEET_S)) or dist.HashStore()
    roll_call(store, world, min(timeout, MEET_S))
    try:
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=limit,
            device_id=own_device if nccl else None,
        )
        cpu_group(limit)
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} could not connect to the others at {world.meets_at} "
            f"({str(error).splitlines()[0]}): check that all ranks started and can reach that host"
        ) from error
    return own_device


def leave() -> None:
    """Destroy the default process group, if there is one, and restore the environment.

    The next world then does not find variables of this one. After an error let the process die instead, unless it is
    alone: peers may be gone (`joined`).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    _undo.close()


@contextmanager
def joined(world: World, device: Device, store: Store | None = None) -> Iterator[torch.device]:
    """Join `world`, yield the device that this process computes on, and leave. Arguments and errors are `join`'s.

    After an error, also one of joining, only a world of one is left: its process may go on, as a notebook does. With
    other ranks, which may be gone, leaving could hang.
    """
    try:
        yield join(world, device, store=store)
    except BaseException:
        if world.size == 1:
            leave()
        raise
    leave()


@contextmanager
def in_world(device: Device) -> Iterator[torch.device]:
    """Yield this process's device, in the process group that exists, or else in the world of the launcher or alone."""
    import torch

    if not torch.distributed.is_initialized():
        with joined(find_world() or ALONE, device) as own_device:
            yield own_device
    else:  # its owner has chosen the device
        yield torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def _own_device(world: World, device: Device) -> torch.device:
    """Return the device of this rank, after making it the current one."""
    import torch

    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # SLURM and MPI can show each process only its own GPU, which then is number 0 for every rank.
    index = 0 if count == 1 and world.launcher in ("slurm", "openmpi") else world.local_rank
    if index >= count:
        raise LaunchError(
            f"rank {world.rank} needs GPU {index} but {count} are visible on this machine: start at most {count} ranks "
            f"here, or compute on the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def share_cores(world: World) -> None:
    """Set the CPU threads of this rank. Through the environment if torch is not imported yet, which is better.

    After ``set_num_threads``, MKL no longer adapts to where it is called. Products inside parallel regions, as in
    attention, then take longer. Does nothing if OMP_NUM_THREADS is set or this rank is alone on its machine, where
    torch decides.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    # SLURM may have bound this process to its share already.
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "") if world.launcher == "slurm" else ""
    if not per_task.isdecimal() and world.local_size == 1:
        return
    threads = int(per_task) if per_task.isdecimal() else cpu_share(world.local_size)
    if "torch" not in sys.modules:
        _set_environment({"OMP_NUM_THREADS": str(threads)})
        return

    import torch

    if torch.get_num_threads() != threads:
        _undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)


def _set_environment(values: Mapping[str, str]) -> None:
    for name, value in values.items():
        if name in os.environ:
            _undo.callback(os.environ.update, {name: os.environ[name]})
        else:
            _undo.callback(os.environ.pop, name, None)
        os.environ[name] = value


def probe() -> None:
    """Join a world that was found and add up one number per rank: the smallest program that shows that worlds work."""
    with reporting():
        world = find_world()
        assert world is not None, "start it through spawn"
        join(world, "cpu", timeout=30.0)

        import torch

        torch.distributed.all_reduce(total := torch.ones(1))
        assert total.item() == world.size
        finish(0)
