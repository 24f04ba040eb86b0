"""vitpar under OpenMPI's mpirun on one host and on two."""

import subprocess
from pathlib import Path

import pytest

from helpers.cluster import Cluster, ended, steps

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]


def train(
    cluster: Cluster, place: Path, ranks: dict[str, int], name: str, *words: str, mca: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start a run on ranks of hosts, with mpirun on n1."""
    here = ",".join(f"{host}:{number}" for host, number in ranks.items())
    settings = {"plm_rsh_agent": str(cluster.folder / "rsh"), "oob_tcp_if_include": "eth0"} | (mca or {})
    command = [
        "mpirun",
        "--allow-run-as-root",
        *(word for key, value in settings.items() for word in ("--mca", key, value)),
    ]
    command += ["--host", here, "-N", str(max(ranks.values())), "--map-by", "slot", "--bind-to", "none"]
    command += ["-x", "MASTER_ADDR=n1", "python", "-m", "vitpar_cli.main", "train", "--recipe", "recipe.toml"]
    command += ["--run-dir", name, "--resume", "auto", *words]
    return cluster.start("n1", command, place)


@pytest.mark.parametrize("ranks", [{"n1": 2}, {"n1": 1, "n2": 1}], ids=["one host", "two hosts"])
def test_mpirun_trains(hosts: Cluster, digits: Path, mpirun: str, ranks: dict[str, int]) -> None:
    name = f"trained{len(ranks)}"
    code, text = ended(train(hosts, digits, ranks, name, "--mesh", "dp2", "--steps", "5"))
    assert code == 0, text
    assert steps(digits / name) == 5
