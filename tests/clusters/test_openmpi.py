"""vitpar under OpenMPI's mpirun on one host and on two."""

import subprocess
from pathlib import Path
from signal import SIGTERM, SIGUSR1, Signals

import pytest

from helpers.cluster import Cluster, ended, last_step, until

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(1800)]


def train(
    cluster: Cluster, place: Path, ranks: dict[str, int], name: str, *words: str, mca: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    """Start a run on ranks of hosts, with mpirun on n1 as docs/machines.md has it."""
    command = [
        *("mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(cluster.folder / "rsh")),
        *("--mca", "oob_tcp_if_include", "eth0", *mca, "--host", ",".join(f"{host}:{n}" for host, n in ranks.items())),
        *("-N", str(max(ranks.values())), "--map-by", "slot", "--bind-to", "none", "-x", "MASTER_ADDR=n1"),
        *("python", "-m", "vitpar_cli.main", "train", "--recipe", "recipe.toml", "--mesh", "dp"),
        *("--run-dir", name, "--resume", "auto", *words),
    ]
    return cluster.start("n1", command, place)


@pytest.mark.parametrize("ranks", [{"n1": 2}, {"n1": 1, "n2": 1}], ids=["one host", "two hosts"])
def test_mpirun_trains(hosts: Cluster, digits: Path, mpirun: str, ranks: dict[str, int]) -> None:
    name = f"trained{len(ranks)}"
    code, text = ended(train(hosts, digits, ranks, name, "--steps", "5"))
    assert code == 0 and "dp2 on 2 ranks" in text, text
    assert last_step(digits / name) == 5


@pytest.mark.parametrize(
    ("number", "mca", "code"),
    # mpirun kills the ranks some seconds after SIGTERM: one by default, and it ends four times as late.
    [(SIGUSR1, (), 75), (SIGTERM, ("--mca", "odls_base_sigkill_timeout", "20"), 1)],
    ids=["SIGUSR1", "SIGTERM"],
)
def test_signal_to_mpirun_ends_the_run_after_it_saved(
    hosts: Cluster, digits: Path, mpirun: str, number: Signals, mca: tuple[str, ...], code: int
) -> None:
    run = digits / f"stopped-{number.name}"
    process = train(hosts, digits, {"n1": 1, "n2": 1}, run.name, "--steps", "100000", mca=mca)
    until(lambda: last_step(run) > 3 or process.poll() is not None)
    process.send_signal(number)
    found, text = ended(process)
    assert found == code, text
    step = last_step(run)
    assert f"stopped by {number.name} after step {step:,}" in (run / "log.txt").read_text(), text
    assert (run / "checkpoints" / f"step_{step}" / "index.json").exists()
