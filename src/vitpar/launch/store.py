"""Rendezvous of the ranks of a world: torch's TCPStore, which accepts every client that reaches its port.

| who started the ranks | who listens | where |
|---|---|---|
| vitpar | the parent | loopback |
| srun, mpirun, the environment, all on one machine | rank 0 | loopback |
| srun, mpirun, the environment, several machines | rank 0 | all interfaces |
| torchrun | its agent; rank 0 with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 | all interfaces |

torch waits without a limit for a program that accepts connections and is no store, and does not name ranks that do not
come. So every wait here has a limit, and rank 0 calls the roll before torch connects the ranks.
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
from vitpar.launch.world import REPORTS, World
from vitpar.text import ranks

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

MEET_S = 300.0
"""Seconds that a rank waits for rank 0, and then rank 0 for all others, at the start."""
ANSWER_S = 30.0
"""Seconds that whoever accepted a connection has to answer as a store does. Rank 0 needs milliseconds."""
_RETRY_S, _MOST_RETRY_S = 0.05, 1.0
"""Seconds between the first two attempts to connect, and the most: they double."""
_TIMEOUT = timedelta(minutes=10)
"""Timeout of the store's calls."""
_HERE, _RESULT = "vitpar/here", "vitpar/roll-call"
"""Keys of the roll call: one a rank, and the error, empty if all have come."""


def meeting_place(world: World, seconds: float = MEET_S) -> Store | None:
    """Return a store that the processes of `world` share without a process group; None in a world of one.

    seconds: to wait for rank 0, if it serves the store.

    Raises LaunchError if they cannot meet, or if another program has the port.
    """
    watch_parent()
    if world.size == 1:
        return None
    allow_open_files(world.size)
    if world.rank or _agent_serves():
        return _client(world, seconds)

    from torch.distributed import DistError, TCPStore

    place = (world.master_addr, world.master_port)
    try:
        if not world.on_loopback:
            # It also connects to itself, by MASTER_ADDR, which may be another host.
            limit = timedelta(seconds=seconds)
            store = TCPStore(*place, is_master=True, wait_for_workers=False, timeout=limit, multi_tenant=True)
            store.set_timeout(_TIMEOUT)
            return store
        listener = socket.create_server(place)
    except (OSError, DistError) as error:
        raise _taken(world, str(error).splitlines()[0]) from None
    # Without a given socket TCPStore listens on all interfaces, whatever its address.
    # upstream: seen in torch 2.13.
    return TCPStore(
        *place, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
    )


def roll_call(store: Store, world: World, seconds: float = MEET_S) -> None:
    """Wait until all ranks of `world` have come to the store. Collective.

    seconds: for all to come, once rank 0 has.

    Raises LaunchError, on all ranks that came, with the numbers of the others.
    """
    # The agents of torchrun keep their store and its keys when they restart the ranks.
    if world.size == 1 or (_agent_serves() and REPORTS not in os.environ):
        return
    from torch.distributed import DistStoreError

    keys = [f"{_HERE}/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], "")
    try:
        if world.rank == 0:
            store.wait(keys, timedelta(seconds=seconds))
            store.set(_RESULT, "")
        else:
            store.wait([_RESULT], timedelta(seconds=seconds + ANSWER_S))
    except DistStoreError:
        if world.rank:
            raise LaunchError(
                f"rank {world.rank} of {world.size}: rank 0 at {_place(world)} has stopped answering: check its "
                f"process and machine, then start again"
            ) from None
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        store.set(
            _RESULT,
            f"{ranks(missing)} of {world.size} did not come to {_place(world)} within {seconds:g} s: check that "
            f"{'its process runs and reaches' if len(missing) == 1 else 'their processes run and reach'} that host",
        )
    if error := store.get(_RESULT).decode():
        time.sleep(1.0 if world.rank == 0 else 0.0)  # until all have read it: this process serves the store
        raise LaunchError(error)


@contextmanager
def meeting(world: World) -> Iterator[None]:
    """Convert torch's errors of ranks that do not find each other to LaunchErrors."""
    import torch.distributed as dist

    try:
        yield
    except dist.DistError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} could not connect to the others at {_place(world)} "
            f"({str(error).splitlines()[0]}): check that all ranks started and can reach that host, or set another "
            f"MASTER_ADDR and MASTER_PORT"
        ) from error


def _agent_serves() -> bool:
    """Return whether the launcher serves the store, so that all ranks are clients."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _client(world: World, seconds: float) -> TCPStore:
    """Return a rank's connection to the store.

    Connects in a thread: TCPStore itself waits forever for a program that accepts connections and is no store.
    """
    from torch.distributed import DistError, TCPStore

    place = (world.master_addr, world.master_port)
    end, pause = time.monotonic() + seconds, _RETRY_S
    while why := _refused(place):
        if time.monotonic() > end:
            raise LaunchError(
                f"rank {world.rank} of {world.size} waited {seconds:g} s for rank 0 at {_place(world)} ({why}): check "
                f"that rank 0 started and that this machine reaches it, or set another MASTER_ADDR and MASTER_PORT"
            )
        time.sleep(pause)
        pause = min(2 * pause, _MOST_RETRY_S)
    stores: list[TCPStore] = []
    errors: list[DistError] = []

    def connect() -> None:
        try:
            stores.append(TCPStore(*place, is_master=False, wait_for_workers=False, timeout=_TIMEOUT))
        except DistError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, name="vitpar-meet", daemon=True)
    thread.start()
    patience = seconds if _agent_serves() else ANSWER_S  # a launcher opens its port before it imports torch
    thread.join(patience)
    if not stores:
        raise _taken(world, str(errors[0]).splitlines()[0] if errors else f"no answer in {patience:g} s")
    return stores[0]


def _refused(place: tuple[str, int]) -> str:
    """Return why no connection to `place` is accepted; empty if one is."""
    try:
        with closing(socket.create_connection(place, timeout=5.0)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _place(world: World) -> str:
    return f"{world.master_addr}:{world.master_port}"


def _taken(world: World, why: str) -> LaunchError:
    return LaunchError(
        f"rank {world.rank} of {world.size} cannot use port {world.master_port} of {world.master_addr} as the "
        f"rendezvous ({why}): set MASTER_PORT to a free port{'' if world.on_loopback else ' of the host of rank 0'}"
    )
