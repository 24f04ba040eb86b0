"""Elastic runs under torchrun on two simulated hosts (loopback addresses): one host leaves during the run.

The run resumes on the remaining ranks, with the losses of an uninterrupted run.
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
from vitpar.training.saving.resume import checkpoints_of

# Seconds. A silent host counts as lost after 8 missed signs of life; late hosts are awaited for last_call_timeout.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=1"


class Hosts:
    """torchrun agents with a common rendezvous, and all their processes, which `end` kills."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.port = free_port()
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, words: list[str], ranks: int = 1, nodes: str = "1:2", restarts: int = 3) -> "subprocess.Popen[str]":
        """Start one more host. The first one hosts the rendezvous store."""
        first = not self.agents
        agent = [
            *("-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={ranks}"),
            *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}"),
            *("--rdzv-id=test", f"--rdzv-conf={QUICK},is_host={str(first).lower()}"),
            f"--local-addr=127.0.0.{1 + len(self.agents)}",
        ]
        self.agents.append(started(self.place, words, agent))
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
    shutil.copytree(shared_run("uninterrupted", tmp_path_factory), folder)
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


def words(run_dir: str, *more: str) -> list[str]:
    begin = ["train", "--recipe", "recipe.toml", "--run-dir", run_dir, "--resume", "auto", "--set", "data.workers=0"]
    return [*begin, *more]


def same_as_through(place: Path, run_dir: str) -> None:
    through, ours = rows(place / "through"), rows(place / run_dir)
    assert ours.keys() == through.keys()
    for key, row in through.items():
        assert ours[key]["loss"] == pytest.approx(row["loss"], rel=1e-4), key
        assert ours[key]["samples"] == row["samples"]


def trained(place: Path, run_dir: str, least: int, agent: "subprocess.Popen[str]") -> None:
    wait_for(lambda: lines(place / run_dir) >= least, agent)


def log(place: Path, run_dir: str) -> str:
    return (place / run_dir / "log.txt").read_text()


@pytest.mark.slow
def test_lost_host_leaves_a_run_that_resumes_under_a_fallback_plan(place: Path, hosts: Hosts) -> None:
    mesh = words("shrunk", "--mesh", "pp2xdp", "--set", 'parallel.fallback_meshes=["fsdp"]')
    first, _ = hosts.start(mesh), hosts.start(mesh)
    trained(place, "shrunk", 9, first)
    # A busy machine may still be writing the checkpoint of step 6.
    wait_for(lambda: bool(checkpoints_of(place / "shrunk").steps()), first)
    hosts.lose(1)
    _, errors = first.communicate(timeout=120)
    assert first.returncode == 0, errors
    assert "rank 0 lost its connection to another rank" in errors
    assert "resuming from shrunk/checkpoints/step_" in log(place, "shrunk")
    reason = "the plan is 'dp1', since the degrees given in 'pp2xdp' multiply to 2, which does not divide 1 rank"
    assert reason in log(place, "shrunk")
    parallel = read_recipe(place / "shrunk" / "recipe.toml").parallel
    assert (parallel.mesh, parallel.fallback_meshes) == ("pp2xdp", ("fsdp",)), "the next start chooses anew"
    assert str(read_plan(place / "shrunk" / "plan.json")) == "dp1"
    same_as_through(place, "shrunk")
