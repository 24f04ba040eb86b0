"""Rendezvous of the ranks of a world: torch's TCPStore, which accepts every client that reaches its port.

| who started the ranks | who listens | where |
|---|---|---|
| vitpar | the parent | loopback |
| srun, mpirun, the environment, all on one machine | rank 0 | loopback |
| srun, mpirun, the environment, several machines | rank 0 | all interfaces |
| torchrun | its agent; rank 0 with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 | all interfaces |

torch waits without a limit for a program that accepts connections and is no store, does not name ranks that do not
come, and holds back the handlers of signals meanwhile. So every wait here has a limit and runs in a thread
(`in_background`), and rank 0 calls the roll before torch connects the ranks.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from vitpar.errors import LaunchError
from vitpar.launch.resources import allow_open_files
from vitpar.launch.world import REPORTS, World
from vitpar.text import ranks
from vitpar.threads import in_background

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

MEET_S = 300.0
"""Seconds that a rank waits for rank 0, and then rank 0 for all others, at the start."""
ANSWER_S = 30.0
"""Seconds that whoever accepted a connection has to answer as a store does. Rank 0 needs milliseconds."""
_TIMEOUT = timedelta(minutes=10)
"""Timeout of the store's calls."""
_HERE, _RESULT = "vitpar/here", "vitpar/roll-call"
"""Keys of the roll call: one a rank, and the error, empty if all have come."""
_THREAD = "vitpar-meet"


def meeting_place(world: World, seconds: float = MEET_S) -> Store | None:
    """Return a store that the processes of `world` share without a process group; None in a world of one.

    seconds: to wait for rank 0, if it serves the store.

    Raises LaunchError if they cannot meet, or if another program has the port.
    """
    allow_open_files(world.size)
    if world.size == 1:
        return None

    from torch.distributed import DistError

    serves = world.rank == 0 and not _agent_serves()
    if not serves:
        _await_rank_0(world, seconds)
    # A launcher opens its port before it imports torch.
    patience = seconds if serves or _agent_serves() else ANSWER_S
    try:
        return in_background(lambda: _store(world, serves), _THREAD).result(patience)
    except TimeoutError:
        why = f"no answer in {patience:g} s"
    except (OSError, DistError) as error:
        why = str(error).splitlines()[0]
    raise LaunchError(
        f"rank {world.rank} of {world.size} cannot use port {world.master_port} of {world.master_addr} as the "
        f"rendezvous ({why}): set MASTER_PORT to a free port{'' if world.on_loopback else ' of the host of rank 0'}"
    )


def roll_call(store: Store, world: World, seconds: float = MEET_S) -> None:
    """Wait until all ranks of `world` have come to the store. Collective.

    seconds: for all to come, once rank 0 has.

    Raises LaunchError, on all ranks that came, with the numbers of the others.
    """
    # The agents of torchrun keep their store and its keys when they restart the ranks.
    if world.size == 1 or (_agent_serves() and REPORTS not in os.environ):
        return
    from torch.distributed import DistError

    keys = [f"{_HERE}/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], "")
    error = ""
    try:
        if world.rank == 0:
            in_background(lambda: store.wait(keys, timedelta(seconds=seconds)), _THREAD).result(2 * seconds)
        else:
            limit = timedelta(seconds=seconds + ANSWER_S)
            answer = in_background(lambda: store.wait([_RESULT], limit) or store.get(_RESULT), _THREAD)
            error = answer.result(2 * seconds + ANSWER_S).decode()
    except (DistError, TimeoutError):
        if world.rank:
            raise LaunchError(
                f"rank {world.rank} of {world.size}: rank 0 at {world.meets_at} has stopped answering: check its "
                f"process and machine, then start again"
            ) from None
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        error = (
            f"{ranks(missing)} of {world.size} did not come to {world.meets_at} within {seconds:g} s: check that "
            f"{'its process runs and reaches' if len(missing) == 1 else 'their processes run and reach'} that host"
        )
    if world.rank == 0:
        store.set(_RESULT, error)
    if error:
        time.sleep(1.0 if world.rank == 0 else 0.0)  # until all have read it: this process serves the store
        raise LaunchError(error)


def _agent_serves() -> bool:
    """Return whether the launcher serves the store, so that all ranks are clients."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _await_rank_0(world: World, seconds: float) -> None:
    """Wait until a program listens at the meeting place. torch would print a warning for every attempt."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((world.master_addr, world.master_port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise LaunchError(
                    f"rank {world.rank} of {world.size} waited {seconds:g} s for rank 0 at {world.meets_at} "
                    f"({error.strerror or error}): check that rank 0 started and that this machine reaches it, or set "
                    f"another MASTER_ADDR and MASTER_PORT"
                ) from None
        time.sleep(0.2)


def _store(world: World, serves: bool) -> TCPStore:
    """Return this rank's connection to the store, which it serves if `serves`."""
    from torch.distributed import TCPStore

    place = (world.master_addr, world.master_port)
    # Without a given socket TCPStore listens on all interfaces, whatever its address.
    # upstream: seen in torch 2.13.
    listener = socket.create_server(place).detach() if serves and world.on_loopback else None
    return TCPStore(
        *place,
        is_master=serves,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        multi_tenant=serves and listener is None,
        master_listen_fd=listener,
    )
