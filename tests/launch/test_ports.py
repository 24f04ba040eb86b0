"""Ports of a world on one machine: nothing listens where another machine could connect."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from helpers.command_line import clean_environment
from vitpar.errors import LaunchError
from vitpar.launch import World
from vitpar.launch import store as meeting
from vitpar.launch.world import LOOPBACK

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are read from /proc")

RANK = """
import sys
from vitpar.launch import find_world, join
from vitpar.launch.store import meeting_place

world = find_world()
if sys.argv[1] == "meeting_place":
    store = meeting_place(world)
    store.set(str(world.rank), "here")
    store.wait([str(1 - world.rank)])
else:
    join(world, "cpu", timeout=60.0)
    import torch, torch.distributed as dist
    dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
print("ready", flush=True)
sys.stdin.read()
"""


def free_port() -> str:
    with socket.create_server((LOOPBACK, 0)) as server:
        return str(server.getsockname()[1])


def openmpi(rank: int) -> dict[str, str]:
    return {
        **{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "prterun-a-7@1"},
        **{"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    }


def slurm(rank: int) -> dict[str, str]:
    return {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"},
        **{"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"},
    }


def listening(pid: int) -> list[str]:
    """Return the addresses, as in /proc/net, on which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for words in (line.split() for line in path.read_text().splitlines()[1:]) if path.exists() else ():
            if words[3] == "0A" and words[9] in sockets:
                found.append(words[1].partition(":")[0])
    return found


LOCAL = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1."""


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Yield a list to which a test adds processes; they are killed afterwards."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("launcher", "how"), [(openmpi, "join"), (slurm, "join"), (openmpi, "meeting_place")])
def test_ranks_on_one_machine_listen_on_loopback_only(
    launcher, how: str, started: list["subprocess.Popen[str]"]
) -> None:
    """torch's store and gloo do not authenticate peers, so an open port would accept anyone."""
    address = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": free_port()}
    for rank in range(2):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, how],
                env=clean_environment() | launcher(rank) | address,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    found = [listening(process.pid) for process in started]
    assert found[0] and LOCAL.issuperset(found[0] + found[1]), found


def test_local_launcher_listens_on_loopback_only(started: list["subprocess.Popen[str]"]) -> None:
    code = (
        "import sys; from vitpar.launch import spawn\n"
        f"rank = {RANK!r}.replace('sys.stdin.read()', 'import time; time.sleep(100)')\n"
        "spawn(2, ['-c', rank, 'join'], device='cpu')"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], env=clean_environment(), stdout=subprocess.PIPE, text=True
    )
    started.append(launcher)
    assert launcher.stdout is not None and launcher.stdout.readline() == "ready\n"  # printed by rank 0
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    found = [listening(pid) for pid in (launcher.pid, *map(int, children))]
    assert len(found) == 3 and all(found) and all(LOCAL.issuperset(addresses) for addresses in found), found


@pytest.mark.parametrize("rank", [0, 1])
def test_occupied_port_is_one_error_line(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that holds the port accepts connections but never answers."""
    monkeypatch.setattr(meeting, "ANSWER_S", 0.2)
    with socket.create_server((LOOPBACK, 0)) as other:
        world = World(rank, 2, rank, 2, "openmpi", LOOPBACK, other.getsockname()[1])
        with pytest.raises(
            LaunchError, match=rf"rank {rank} of 2 cannot use port \d+ .* set MASTER_PORT to a free port"
        ):
            meeting.meeting_place(world)


def test_missing_rank_0_is_one_error_line() -> None:
    world = World(1, 2, 1, 2, "slurm", LOOPBACK, int(free_port()))
    with pytest.raises(LaunchError, match=r"rank 1 of 2 waited 0\.2 s for rank 0 at 127\.0\.0\.1:\d+: check that all"):
        meeting.loopback_store(world, timedelta(seconds=0.2))
