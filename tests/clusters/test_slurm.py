"""vitpar under SLURM on two hosts: srun, and the shipped script that resumes."""

from pathlib import Path

import pytest

from helpers.cluster import steps
from helpers.paths import ROOT
from helpers.slurm import Slurm

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]
SCRIPT = ROOT / "experiments" / "train.sbatch"
ONE_EACH = ("--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")


def test_srun_trains(slurm: Slurm, digits: Path) -> None:
    said = slurm.command(
        "srun",
        "-N",
        "2",
        "-n",
        "2",
        "--distribution=block",
        "--wait=60",
        "python",
        "-m",
        "vitpar_cli.main",
        "train",
        "--recipe",
        "recipe.toml",
        "--mesh",
        "dp2",
        "--steps",
        "5",
        "--run-dir",
        "srun",
        "--resume",
        "auto",
        place=digits,
    )
    assert steps(digits / "srun") == 5, said
