"""Ports of a world on one machine: nothing listens where another machine could connect."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.command_line import clean_environment
from helpers.ranks import free_port, in_forks
from vitpar.errors import LaunchError
from vitpar.launch import World, find_world, join
from vitpar.launch import store as meeting
from vitpar.launch.world import LOOPBACK

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are read from /proc")


def slurm(rank: int) -> dict[str, str]:
    return {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"},
        **{"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"},
    }


def listening(pid: int | str = "self") -> list[str]:
    """Return the addresses, as in /proc/net, on which a process listens."""
    sockets = {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").glob("*") if descriptor.is_symlink()}
    found = []
    for path in (Path(f"/proc/{pid}/net/{table}") for table in ("tcp", "tcp6")):
        for words in (line.split() for line in path.read_text().splitlines()[1:]) if path.exists() else ():
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.append(words[1].partition(":")[0])
    return found


LOCAL = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1."""


def joined() -> list[str]:
    """Meet the other rank, and return the addresses on which this one listens."""
    world = find_world()
    assert world is not None
    join(world, "cpu", timeout=60.0)
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    return listening()


def test_ranks_on_one_machine_listen_on_loopback_only() -> None:
    """torch's store and gloo do not authenticate peers, so an open port would accept anyone."""
    address = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": free_port()}
    found = in_forks(joined, [slurm(rank) | address for rank in range(2)])
    assert found[0] and LOCAL.issuperset(found[0] + found[1]), found


RANK = """
import time
from vitpar.launch import find_world, join
join(find_world(), "cpu", timeout=60.0)
import torch, torch.distributed as dist
dist.all_reduce(torch.ones(1))
print("ready", flush=True)
time.sleep(100)
"""


def test_local_launcher_listens_on_loopback_only() -> None:
    code = f"from vitpar.launch import spawn; spawn(2, ['-c', {RANK!r}])"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, env=clean_environment(), stdout=pipe, text=True) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"  # printed by rank 0
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        found = [listening(pid) for pid in (launcher.pid, *map(int, children))]
        launcher.kill()
    assert len(found) == 3 and all(found) and all(LOCAL.issuperset(addresses) for addresses in found), found


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_occupied_port_is_one_error_line(rank: int, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that holds the port accepts connections but never answers."""
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as other:
        local = (rank, 2) if hosts == 1 else (0, 1)
        world = World(rank, 2, *local, "openmpi", LOOPBACK, other.getsockname()[1])
        with pytest.raises(
            LaunchError, match=rf"rank {rank} of 2 cannot use port \d+ .* set MASTER_PORT to a free port"
        ):
            meeting.meeting_place(world)


def test_missing_rank_0_is_one_error_line() -> None:
    world = World(1, 2, 1, 2, "slurm", LOOPBACK, int(free_port()))
    error = (
        r"rank 1 of 2 waited 0\.2 s for rank 0 at 127\.0\.0\.1:\d+ \(Connection refused\): check that rank 0 started"
    )
    with pytest.raises(LaunchError, match=error):
        meeting.meeting_place(world, 0.2)


def join_without_rank_1() -> str:
    with pytest.raises(LaunchError) as refused:
        join(World(0, 2, 0, 2, "slurm", LOOPBACK, int(free_port())), "cpu", timeout=0.3)
    return str(refused.value)


def test_join_calls_the_roll() -> None:
    (said,) = in_forks(join_without_rank_1, [{}])
    assert said.startswith("rank 1 of 2 did not come to 127.0.0.1:")


def came(store: dist.Store, world: World) -> str:
    with pytest.raises(LaunchError) as refused:
        meeting.roll_call(store, world, 0.3)
    return str(refused.value)


def test_roll_call_names_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that came get the same sentence; if rank 0 itself stops, they say so."""
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: None)
    first, second, third = (World(rank, 5, rank, 5, "slurm", "n1", 29500) for rank in (0, 1, 3))
    store = dist.HashStore()
    assert came(store, second) == (
        "rank 1 of 5: rank 0 at n1:29500 has stopped answering: check its process and machine, then start again"
    )
    store = dist.HashStore()
    store.set("vitpar/here/3", "")
    said = came(store, first)
    assert said.startswith(
        "ranks 1, 2 and 4 of 5 did not come to n1:29500 within 0.3 s: check that their processes run"
    )
    assert came(store, third) == said
