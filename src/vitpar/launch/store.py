"""Rendezvous of the ranks of a world: torch's TCPStore, which accepts every client that reaches its port.

| who started the ranks | who listens | where |
|---|---|---|
| vitpar | the parent | loopback |
| srun, mpirun, the environment, all on one machine | rank 0 | loopback |
| srun, mpirun, the environment, several machines | rank 0 | all interfaces |
| torchrun | its agent | all interfaces |
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from vitpar.errors import LaunchError
from vitpar.launch.report import watch_parent
from vitpar.launch.resources import allow_open_files
from vitpar.launch.world import LOOPBACK, World

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

ANSWER_S = 30.0
"""Seconds that whoever accepted a connection has to answer as a store does. Rank 0 needs milliseconds."""
_RETRY_S = 0.05
"""Seconds between two attempts to connect."""


def meeting_place(world: World) -> Store | None:
    """Return a store that the processes of `world` share without a process group; None in a world of one.

    Raises LaunchError if they cannot meet.
    """
    watch_parent()
    if world.size == 1:
        return None
    allow_open_files(world.size)
    from torch.distributed import TCPStore

    limit = timedelta(minutes=10)
    with meeting(world):
        if store := loopback_store(world, limit):
            return store
        ours = world.rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ
        address = (world.master_addr, world.master_port)
        return TCPStore(*address, world_size=world.size, is_master=ours, timeout=limit)


def loopback_store(world: World, limit: timedelta) -> Store | None:
    """Return the store of a world that meets on loopback (`World.on_loopback`), where rank 0 listens; None for others.

    limit: time to wait for rank 0 here, and timeout of the store's calls.

    Raises LaunchError if another program has the port.
    """
    if not world.on_loopback:
        return None
    from torch.distributed import TCPStore

    place = (LOOPBACK, world.master_port)
    if world.rank:
        return _client(world, limit)
    try:
        listener = socket.create_server(place)
    except OSError as error:
        raise _taken(world, os.strerror(error.errno or 0)) from None
    # Without a given socket TCPStore listens on all interfaces, whatever its address.
    # upstream: seen in torch 2.13.
    return TCPStore(*place, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach())


@contextmanager
def meeting(world: World) -> Iterator[None]:
    """Convert torch's errors of ranks that do not find each other to LaunchErrors."""
    import torch.distributed as dist

    try:
        yield
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} could not connect to the others at "
            f"{world.master_addr}:{world.master_port} ({str(error).splitlines()[0]}): check that all ranks started and "
            f"can reach that host, or set another MASTER_ADDR and MASTER_PORT"
        ) from error


def _client(world: World, limit: timedelta) -> TCPStore:
    """Return a rank's connection to the store of rank 0 on this machine.

    Connects in a thread: TCPStore itself waits forever for a program that accepts connections and is no store.
    """
    from torch.distributed import DistError, TCPStore

    place = (LOOPBACK, world.master_port)
    end = time.monotonic() + limit.total_seconds()
    while not _accepts(place):
        if time.monotonic() > end:
            raise LaunchError(
                f"rank {world.rank} of {world.size} waited {limit.total_seconds():g} s for rank 0 at "
                f"{LOOPBACK}:{world.master_port}: check that all ranks started"
            )
        time.sleep(_RETRY_S)
    stores: list[TCPStore] = []
    errors: list[DistError] = []

    def connect() -> None:
        try:
            stores.append(TCPStore(*place, is_master=False, wait_for_workers=False, timeout=limit))
        except DistError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, name="vitpar-meet", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if not stores:
        raise _taken(world, str(errors[0]).splitlines()[0] if errors else f"no answer in {ANSWER_S:g} s")
    return stores[0]


def _accepts(place: tuple[str, int]) -> bool:
    try:
        with closing(socket.create_connection(place, timeout=1.0)):
            return True
    except OSError:
        return False


def _taken(world: World, why: str) -> LaunchError:
    return LaunchError(
        f"rank {world.rank} of {world.size} cannot use port {world.master_port} of {LOOPBACK} as the "
        f"rendezvous ({why}): set MASTER_PORT to a free port"
    )
