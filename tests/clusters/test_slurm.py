"""vitpar under SLURM on two hosts: srun, and the shipped script, which resumes after a preemption."""

from pathlib import Path

import pytest

from helpers.cluster import last_step, until
from helpers.paths import ROOT
from helpers.slurm import Slurm

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(1800)]
SCRIPT = ROOT / "experiments" / "train.sbatch"
HERE = ("--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1")


def test_srun_trains(slurm: Slurm, digits: Path) -> None:
    srun = ("srun", "-N", "2", "-n", "2", "--distribution=block", "--wait=60")
    words = ("--recipe", "recipe.toml", "--mesh", "dp", "--steps", "5", "--run-dir", "srun", "--resume", "auto")
    said = slurm.command(*srun, "python", "-m", "vitpar_cli.main", "train", *words, place=digits)
    assert last_step(digits / "srun") == 5 and "dp2 on 2 ranks" in said, said


@pytest.mark.parametrize("reason", ["SIGTERM", "SIGUSR1"])
def test_shipped_script_resumes_until_it_is_cancelled(slurm: Slurm, digits: Path, reason: str) -> None:
    """It resumes after a preemption, which sends SIGTERM, and after SIGUSR1, as before a time limit."""
    job = slurm.submit(digits, SCRIPT, HERE, "--recipe", "recipe.toml", "--mesh", "dp", "--steps", "100000")
    run, output = digits / "runs" / f"vitpar-{job}", digits / f"vitpar-{job}.out"

    def said() -> str:
        return f"{slurm.job(job)}\n{output.read_text() if output.exists() else ''}"

    until(lambda: last_step(run) > 3, what=said)
    if reason == "SIGTERM":  # a job of more priority takes both hosts for a while
        slurm.command("sbatch", "-p", "high", "-N", "2", "--exclusive", "--wrap", "srun sleep 3", place=digits)
    else:
        slurm.command("scancel", "--signal=USR1", job)
    until(lambda: slurm.job(job)["JobState"] == "PENDING", what=said)
    saved = last_step(run)
    assert f"stopped by {reason} after step {saved:,}" in output.read_text(), said()
    # Not two minutes later, as after a requeue, nor at once: SLURM has revoked the credential of that second.
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now+5seconds")
    until(lambda: last_step(run) > saved, what=said)
    assert f"resuming from runs/vitpar-{job}/checkpoints/step_{saved}" in output.read_text()
    assert slurm.job(job)["Restarts"] == "1"

    slurm.command("scancel", job)
    until(lambda: slurm.job(job)["JobState"] == "CANCELLED", what=said)
    last = last_step(run)
    assert last > saved and (run / "checkpoints" / f"step_{last}" / "index.json").exists(), said()
    assert output.read_text().count("requeued to resume") == 1, said()
