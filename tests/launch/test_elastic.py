"""Runs under torchrun on two hosts (loopback addresses of one machine) of which one goes or comes: they go on by
themselves, on as many ranks as there are, with the losses of a run that never stopped."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.command_line import run, started
from helpers.killed_runs import RECIPE, alive, lines, ranks_of, rows, wait_for
from helpers.small_data import pack_small
from vitpar.strategy.plan_json import read_plan
from vitpar.training.recipe import read_recipe

# Seconds: how soon a host is missed that does not answer, and how long others are waited for once there are enough.
QUICK = "keep_alive_interval=1,keep_alive_max_attempt=8,last_call_timeout=1"


class Hosts:
    """torchrun agents that meet at one place, and all they started; `end` leaves none of them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.agents: list[subprocess.Popen[str]] = []

    def start(self, words: list[str], ranks: int = 1, nodes: str = "1:2", restarts: int = 3) -> "subprocess.Popen[str]":
        """One more host. The first holds the place where they meet."""
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
        """Stop a host as if its machine were switched off."""
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
    """A folder with packed data, a recipe, and the run `through` that never stopped."""
    folder = tmp_path_factory.mktemp("place")
    pack_small(folder).rename(folder / "data")
    (folder / "recipe.toml").write_text(RECIPE + "\n[parallel]\nmicrobatches = 2\n")
    done = run(folder, ["train", "--recipe", "recipe.toml", "--run-dir", "through", "--set", "data.workers=0"])
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def hosts(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    # Else torch 2.13 tells a host that comes later no address, and both end after a minute (pytorch#135712).
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


def asked_to_end(pid: int) -> bool:
    """Whether SIGTERM waits for a process that is stopped."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool((int(status["ShdPnd"], 16) | int(status["SigPnd"], 16)) >> (signal.SIGTERM - 1) & 1)


def log(place: Path, run_dir: str) -> str:
    return (place / run_dir / "log.txt").read_text()


@pytest.mark.slow
def test_a_host_is_lost_and_the_other_goes_on_with_the_plan_for_its_ranks(place: Path, hosts: Hosts) -> None:
    mesh = words("shrunk", "--mesh", "pp2xdp", "--set", 'parallel.fallback_meshes=["fsdp"]')
    first, _ = hosts.start(mesh), hosts.start(mesh)
    trained(place, "shrunk", 9, first)
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


@pytest.mark.slow
def test_a_host_comes_and_the_run_takes_it_in(place: Path, hosts: Hosts) -> None:
    mesh = words("grown", "--mesh", "dp")
    first = hosts.start(mesh)
    trained(place, "grown", 5, first)
    # Held until its agent asks it to end, or the run would be over before the other host is there.
    (rank,) = ranks_of(first.pid)
    os.kill(rank, signal.SIGSTOP)
    second = hosts.start(mesh)
    wait_for(lambda: asked_to_end(rank), second)
    os.kill(rank, signal.SIGCONT)
    for agent in (first, second):
        _, errors = agent.communicate(timeout=150)
        assert agent.returncode == 0, errors
    # Its ranks were asked to end, and saved: nothing was done twice.
    assert "stopped by SIGTERM" in log(place, "grown") and "dp2 on cpu" in log(place, "grown")
    same_as_through(place, "grown")
