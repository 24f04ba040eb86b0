"""Signals that ask a rank to end while it starts."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from helpers.command_line import clean_environment
from helpers.ranks import exits
from vitpar.launch.stop_request import SAVED, StopRequest, stop_at_once


def starting(number: signal.Signals, blocked: bool) -> None:
    """Receive a signal as a rank that waits for others in C code, or before it does."""
    from torch.distributed import HashStore

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if blocked:
        os.kill(os.getpid(), number)
    stop_at_once()
    if not blocked:
        child = os.fork()
        if not child:
            os.kill(os.getppid(), number)
            os._exit(0)
    HashStore().wait(["never"], timedelta(seconds=100))


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


def test_children_and_the_training_loop_have_the_default_actions() -> None:
    assert exits(forked, [{}])[0][0] == 100 - signal.SIGTERM
    assert exits(training, [{}])[0][0] == -signal.SIGTERM


def test_sigusr1_does_not_kill_a_command_that_still_imports() -> None:
    program = "import vitpar_cli, os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    assert subprocess.run([sys.executable, "-c", program], env=clean_environment(), timeout=60).returncode == 0
