"""vitpar under torchrun on two hosts: a cut link."""

from pathlib import Path

import pytest

from helpers.cluster import Cluster, ended, last_step, until
from helpers.ranks import free_port

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(1800)]
ELASTIC = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SILENT_S = 10
"""Seconds after which a silent rank is lost, in place of two minutes."""
PROGRAM = f"""
from vitpar.training.faults import watchdog
watchdog.LOST_S = {SILENT_S}
from vitpar_cli.main import main
main()
"""


class Run:
    """A run under a torchrun on each host, in docs/machines.md's words, with a rank each."""

    def __init__(self, cluster: Cluster, place: Path, name: str, *words: str) -> None:
        self.cluster, self.path = cluster, place / name
        (place / "program.py").write_text(PROGRAM)
        command = [
            *("torchrun", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", f"--rdzv-id={name}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=n1:{free_port()}", "--rdzv-conf=last_call_timeout=10"),
            *("program.py", "train", "--recipe", "recipe.toml", "--mesh", "dp", "--run-dir", name),
            *("--resume", "auto", *words),
        ]
        self.agents = {host: cluster.start(host, command, place, **ELASTIC) for host in ("n1", "n2")}

    @property
    def log(self) -> str:
        return (self.path / "log.txt").read_text() if self.path.exists() else ""


def test_run_goes_on_without_a_host_whose_link_is_cut(hosts: Cluster, digits: Path) -> None:
    """The other host resumes from the last checkpoint, and fills the open degree with its rank.

    tests/launch/test_elastic.py kills a host.
    """
    run = Run(hosts, digits, "cut", "--steps", "100000", "--set", "checkpoint.every=20")
    until(lambda: last_step(run.path) > 25, what=lambda: run.log)
    before = last_step(run.path)
    assert "dp2 on cpu" in run.log
    hosts.cut("n2")
    try:
        until(lambda: "dp1 on cpu" in run.log and last_step(run.path) > before + 20, what=lambda: run.log)
        assert "resuming from" in run.log
        assert f"error: the run hangs: rank 1 on n2 gave no sign of life for {SILENT_S} s: " in run.log
        # Its rank ends, and its agent waits for the rendezvous on n1.
        until(lambda: len(hosts.pids("n2")) == 1)
        run.agents["n2"].kill()
        _, text = ended(run.agents["n2"])
        assert f"error: the run hangs: rank 0 on n1 gave no sign of life for {SILENT_S} s: " in text, text
    finally:
        hosts.connect("n2")
        for agent in run.agents.values():
            agent.kill()
        hosts.clear()
