"""Elastic runs under torchrun on two simulated hosts (loopback addresses): one host joins and leaves during the run.

The run resumes on the ranks that are there, with the losses of an uninterrupted run.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.command_line import started
from helpers.killed_runs import RECIPE, alive, lines, ranks_of, rows, wait_for
from helpers.ranks import free_port
from helpers.shared_runs import shared_run
from vitpar.recipe import read_recipe
from vitpar.strategy.plan_json import read_plan

# Seconds. A silent host counts as lost after 8 missed signs of life; late hosts are awaited for last_call_timeout.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=1"

WORDS = [
    *("train", "--recipe", "recipe.toml", "--run-dir", "elastic", "--resume", "auto", "--mesh", "pp2xdp"),
    *("--set", "data.workers=0", "--set", 'parallel.fallback_meshes=["fsdp"]'),
]


class Hosts:
    """torchrun agents with a common rendezvous, and all their processes, which `end` kills."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = free_port()
        self.agents: list[subprocess.Popen[str]] = []

    def start(self) -> "subprocess.Popen[str]":
        """Start one more host with one rank. The first one hosts the rendezvous store."""
        first = not self.agents
        agent = [
            *("-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"),
            *("--rdzv-id=test", f"--rdzv-conf={QUICK},is_host={str(first).lower()}"),
            f"--local-addr=127.0.0.{1 + len(self.agents)}",
        ]
        self.agents.append(started(self.place, WORDS, agent))
        return self.agents[-1]

    def lose(self, host: int) -> None:
        """Kill a host with all its ranks, as if its machine lost power."""
        pids = [self.agents[host].pid, *ranks_of(self.agents[host].pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.agents[host].communicate(timeout=60)

    def end(self) -> None:
        for agent in self.agents:
            for pid in alive(ranks_of(agent.pid)):
                os.kill(pid, signal.SIGKILL)
            agent.kill()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed data, a recipe, and the uninterrupted run `through`."""
    folder = tmp_path_factory.mktemp("elastic") / "place"
    shutil.copytree(shared_run("uninterrupted classify", tmp_path_factory), folder)
    (folder / "recipe.toml").write_text(RECIPE + "\n[parallel]\nmicrobatches = 2\n")
    return (folder / "run").rename(folder / "through").parent


@pytest.fixture
def hosts(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # Without this, torch 2.13 gives a later host no store address, and both fail after a minute (pytorch#135712).
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    started = Hosts(place)
    yield started
    started.end()


def asked_to_end(pid: int) -> bool:
    """Return whether SIGTERM is pending for a stopped process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)) >> (signal.SIGTERM - 1) & 1)


def log(run: Path) -> str:
    return (run / "log.txt").read_text()


@pytest.mark.slow
def test_hosts_join_and_leave_a_run(place: Path, hosts: Hosts) -> None:
    """One host trains under the fallback plan, two under the plan, and one again after the other is lost."""
    run, first = place / "elastic", hosts.start()
    wait_for(lambda: lines(run) >= 5, first)
    # Stop the rank until its agent sends SIGTERM; otherwise the run could end before the other host arrives.
    (rank,) = ranks_of(first.pid)
    os.kill(rank, signal.SIGSTOP)
    second = hosts.start()
    wait_for(lambda: asked_to_end(rank), second)
    before = lines(run)
    os.kill(rank, signal.SIGCONT)
    wait_for(lambda: lines(run) >= before + 4 and "pp2 on cpu" in log(run), first)
    hosts.lose(1)
    _, errors = first.communicate(timeout=150)
    assert first.returncode == 0, errors
    assert "stopped by SIGTERM" in log(run), "the rank saved, so no step ran twice"
    assert "rank 0 lost its connection to another rank" in errors
    assert log(run).count("resuming from elastic/checkpoints/step_") == 2
    reason = "the plan is 'dp1', since the degrees given in 'pp2xdp' multiply to 2, which does not divide 1 rank"
    assert log(run).count(reason) == 2
    parallel = read_recipe(run / "recipe.toml").parallel
    assert (parallel.mesh, parallel.fallback_meshes) == ("pp2xdp", ("fsdp",)), "the next start chooses a mesh again"
    assert str(read_plan(run / "plan.json")) == "dp1"
    through, ours = rows(place / "through"), rows(run)
    assert ours.keys() == through.keys()
    for key, row in through.items():
        assert ours[key]["loss"] == pytest.approx(row["loss"], rel=1e-4), key
        assert ours[key]["samples"] == row["samples"]
