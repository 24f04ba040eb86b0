"""vitpar under torchrun on two hosts: a lost host, a cut link, and a slow one."""

from pathlib import Path

import pytest

from helpers.cluster import Cluster, ended, steps
from helpers.ranks import free_port

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]
ELASTIC = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Run:
    """A run under a torchrun on each host, in docs/machines.md's words."""

    def __init__(self, cluster: Cluster, place: Path, name: str, *words: str, nodes: str = "1:2") -> None:
        self.cluster, self.path = cluster, place / name
        port = free_port()
        command = [
            *("torchrun", f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", f"--rdzv-id={name}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=n1:{port}", "--rdzv-conf=last_call_timeout=5"),
            *("-m", "vitpar_cli.main", "train", "--recipe", "recipe.toml", "--mesh", "dp", "--run-dir", name),
            *("--resume", "auto", *words),
        ]
        self.agents = {host: cluster.start(host, command, place, **ELASTIC) for host in ("n1", "n2")}

    def log(self) -> str:
        try:
            return (self.path / "log.txt").read_text()
        except FileNotFoundError:
            return ""


def test_torchrun_trains(hosts: Cluster, digits: Path) -> None:
    run = Run(hosts, digits, "torchrun", "--steps", "5")
    for agent in run.agents.values():
        code, text = ended(agent)
        assert code == 0, text
    assert steps(run.path) == 5 and "dp2 on cpu" in run.log()
