"""Worlds over several machines: srun and mpirun variables, the SLURM script, and errors under torchrun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import killed_runs
from helpers.command_line import clean_environment, run
from helpers.killed_runs import alive, lines, rows, wait_for
from helpers.paths import ROOT
from helpers.ranks import free_port, in_forks

PROGRAM = """
import os, sys
from pathlib import Path
from vitpar.launch import find_world, join, leave, reporting

with reporting():
    world = find_world()
    join(world, "cpu", timeout=100)
    import torch, torch.distributed as dist
    everyone = [None] * world.size
    dist.all_gather_object(everyone, (world.rank, os.environ["HOST"], world.local_rank, world.local_size))
    text = f"{world.launcher} {world.single_machine} {os.environ.get('GLOO_SOCKET_IFNAME')} {everyone}"
    Path(sys.argv[1], f"rank{world.rank}").write_text(text)
    leave()
"""
HOSTS = ("a", "a", "b", "b")
RECIPE = killed_runs.RECIPE


def slurm(rank: int, port: str) -> dict[str, str]:
    """Return the environment that srun gives to one of two tasks on each of two hosts."""
    return {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)},
        **{"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a,b"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": port},
    }


def openmpi(rank: int, port: str) -> dict[str, str]:
    """Return the environment that mpirun gives to such a task."""
    return {
        **{"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-7@1"},
        **{"OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 2), "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": port},
    }


def met(folder: Path) -> None:
    sys.argv[1:] = [str(folder)]
    exec(PROGRAM, {})


@pytest.mark.parametrize("launcher", [slurm, openmpi])
def test_tasks_on_two_hosts_form_one_world(launcher, tmp_path: Path) -> None:
    port, common = free_port(), {"GLOO_SOCKET_IFNAME": "lo"}
    in_forks(met, [launcher(rank, port) | common | {"HOST": host} for rank, host in enumerate(HOSTS)], tmp_path)
    everyone = [(rank, host, rank % 2, 2) for rank, host in enumerate(HOSTS)]
    for rank in range(4):
        assert (tmp_path / f"rank{rank}").read_text() == f"{launcher.__name__} False lo {everyone}"


# Errors under torchrun


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
def test_torchrun_shows_the_error_line_of_the_failed_rank(place: Path) -> None:
    done = run(place, ["train", "--recipe", "recipe.toml", "--mesh", "pp3xdp", "--run-dir", "no"], TORCHRUN)
    sentence = "error: the degrees given in 'pp3xdp' multiply to 3, which does not divide 2 ranks: choose degrees"
    assert done.returncode == 1 and "vitpar_cli" not in done.stderr.replace("vitpar_cli.main FAILED", "")
    # Each rank prints it once, but torchrun may end the other one earlier.
    assert sum(line.startswith(sentence) for line in done.stderr.splitlines()) in (1, 2)
    root = done.stderr.partition("Root Cause (first observed failure):")[2]
    assert f"traceback : {sentence}" in root and "exitcode  : 2" in root
    assert not (place / "no").exists()


@pytest.mark.slow
def test_torchrun_shows_the_cause_and_not_the_disconnected_peer(place: Path) -> None:
    # Rank 1 raises; rank 0 only sees the closed connection.
    (place / "crash.py").write_text(
        "import os, sys\n"
        "from vitpar.training.trainer import Trainer\n"
        "step = Trainer.step\n"
        "def broken(self, number, batch):\n"
        "    if number == 3 and self.rank == 1:\n"
        "        raise RuntimeError('the true cause')\n"
        "    return step(self, number, batch)\n"
        "Trainer.step = broken\n"
        "from vitpar_cli.main import main\n"
        "main()\n"
    )
    words = ["train", "--recipe", "recipe.toml", "--mesh", "dp2", "--run-dir", "crashed"]
    begin = time.monotonic()
    process = subprocess.run(
        [sys.executable, *TORCHRUN, "crash.py", *words],
        cwd=place,
        env=clean_environment(),
        text=True,
        capture_output=True,
    )
    assert process.returncode == 1 and time.monotonic() - begin < 200
    root = process.stderr.partition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in root and "RuntimeError: the true cause" in root
    assert "rank 0 lost its connection to another rank" in process.stderr


# The SLURM script

SRUN = """#!/bin/bash
echo "srun $*" >> calls
[ -n "${SRUN_CODE:-}" ] && exit "$SRUN_CODE"
while [ "${1#--}" != "$1" ]; do shift; done
for rank in 0 1; do
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_NODEID=$rank \\
        SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST=localhost,other GLOO_SOCKET_IFNAME=lo "$@" &
    echo $! >> tasks
done
code=0
for task in $(jobs -p); do wait "$task"; this=$?; [ $this -gt $code ] && code=$this; done
exit $code
"""

SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames localhost,other" ] && exec printf "localhost\\nother\\n"
echo "scontrol $*" >> calls
[ "$1" != show ] || echo "JobId=7 JobName=job JobState=${JOB_STATE:-RUNNING} Reason=None"
"""


@pytest.fixture
def cluster(place: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a batch script on a simulated cluster of two hosts."""
    tools = place / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    for name in ("calls", "tasks"):
        (place / name).unlink(missing_ok=True)
    yield clean_environment() | {
        **{"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable},
        **{"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "job", "SLURM_CPUS_PER_TASK": "1", "SLURM_NTASKS": "2"},
        "MASTER_PORT": free_port(),
    }


SBATCH = ("bash", str(ROOT / "experiments" / "train.sbatch"))


def test_slurm_script_requeues_only_a_preempted_run(place: Path, cluster: dict[str, str]) -> None:
    """Exit code 75 means that the run has saved and can resume; errors and cancelled jobs must not be repeated."""
    words, calls = ["--mesh", "pp2: embed=dp2, *=fsdp2"], place / "calls"
    for code in (0, 75, 1, 2):
        calls.unlink(missing_ok=True)
        done = subprocess.run([*SBATCH, *words], cwd=place, env=cluster | {"SRUN_CODE": str(code)}, timeout=60)
        assert done.returncode == code
        first, *rest = calls.read_text().splitlines()
        assert first.startswith("srun --distribution=block --wait=60 --cpus-per-task=1 ")
        assert first.endswith(f" -m vitpar_cli.main train --run-dir runs/job-7 --resume auto {' '.join(words)}")
        assert rest == ["scontrol show job 7", "scontrol requeue 7"] * (code == 75)
    calls.unlink()
    subprocess.run(
        [*SBATCH, *words], cwd=place, env=cluster | {"SRUN_CODE": "75", "JOB_STATE": "COMPLETING"}, timeout=60
    )
    assert "requeue" not in calls.read_text()


@pytest.mark.slow
def test_slurm_script_saves_at_a_preemption(place: Path, cluster: dict[str, str]) -> None:
    words = [*SBATCH, "--recipe", "recipe.toml", "--mesh", "dp", "--set", "data.workers=0", "--steps", "20000"]
    run_dir, calls = place / "runs" / "job-7", place / "calls"
    pipe = subprocess.PIPE
    batch = subprocess.Popen(words, cwd=place, env=cluster, stdout=pipe, stderr=pipe, text=True)
    try:
        wait_for(lambda: lines(run_dir) > 5, batch)
        tasks = [int(pid) for pid in (place / "tasks").read_text().split()]
        for pid in [batch.pid, *tasks]:  # preemption signals the ranks and the script
            os.kill(pid, signal.SIGUSR1)
        out, errors = batch.communicate(timeout=100)
    finally:
        batch.kill()
    assert batch.returncode == 75, errors
    assert "requeued to resume runs/job-7" in out and calls.read_text().endswith("scontrol requeue 7\n")
    assert not alive(tasks)
    assert (run_dir / "checkpoints" / f"step_{max(step for _, step in rows(run_dir))}").is_dir()
