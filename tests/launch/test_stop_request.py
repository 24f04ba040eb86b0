"""Signals that ask a rank to end while it starts."""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from helpers.command_line import clean_environment
from helpers.killed_runs import wait_for
from helpers.ranks import exits, free_port
from vitpar.launch.stop_request import SAVED, StopRequest, stop_at_once


def starting(number: signal.Signals, blocked: bool) -> None:
    """Receive a signal as a rank that starts, or before it does."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if blocked:
        os.kill(os.getpid(), number)
    stop_at_once()
    if not blocked:
        child = os.fork()
        if not child:
            os.kill(os.getppid(), number)
            os._exit(0)
    time.sleep(100)


def forked() -> None:
    """End a child that a starting rank has forked."""
    stop_at_once()
    child = os.fork()
    if not child:
        time.sleep(100)
    os.kill(child, signal.SIGTERM)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 100)


def training() -> None:
    """Receive two signals as a rank that trains."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    stop_at_once()
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.asked == signal.SIGUSR1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(100)


@pytest.mark.parametrize(
    ("number", "blocked"), [(signal.SIGTERM, False), (signal.SIGUSR1, False), (signal.SIGUSR1, True)]
)
def test_signal_to_a_starting_rank_ends_it_with_the_code_of_a_saved_run(number: signal.Signals, blocked: bool) -> None:
    ((code, errors),) = exits(starting, [{}], number, blocked)
    assert (code, errors) == (SAVED, f"stopped by {number.name} before the first step\n")


def test_sigterm_ends_a_rank_that_waits_for_others_with_the_code_of_a_saved_run(data: Path, tmp_path: Path) -> None:
    """Rank 1 of the srun step never comes."""
    port = free_port()
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    step |= {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "vitpar_cli.main", "train", "--data", str(data), "--mesh", "dp", "--run-dir", "x"]
    rank = subprocess.Popen(command, cwd=tmp_path, env=clean_environment() | step, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: not socket.socket().connect_ex(("127.0.0.1", int(port))), rank)
    rank.terminate()
    assert rank.communicate(timeout=60)[1] == "stopped by SIGTERM before the first step\n"
    assert rank.returncode == SAVED


def test_children_and_the_training_loop_have_the_default_actions() -> None:
    assert exits(forked, [{}])[0][0] == 100 - signal.SIGTERM
    assert exits(training, [{}])[0][0] == -signal.SIGTERM


@pytest.mark.parametrize(
    "program",
    [
        "import vitpar_cli, interrupted",  # an exception within an import may be lost
        "from vitpar_cli.program import run_program; run_program(lambda: exec(open('interrupted.py').read()))",
        "from vitpar_cli.main import app, main; app.command('x')(lambda: exec(open('interrupted.py').read())); main()",
    ],
    ids=["import", "program", "command"],
)
def test_ctrl_c_ends_a_command_without_a_line(program: str, tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    command = [sys.executable, "-c", program, "x"]
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background processes of a shell ignore it
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60, preexec_fn=default
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_sigusr1_does_not_kill_a_command_that_still_imports() -> None:
    program = "import vitpar_cli, os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    assert subprocess.run([sys.executable, "-c", program], env=clean_environment(), timeout=60).returncode == 0
