"""Commands that tests fork behave as in a new process and share no state. Commands that only read need no torch."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from helpers.command_line import run, run_without_torch, started
from helpers.shared_runs import shared_run


def test_fork_prints_and_exits_as_a_new_process_does(tmp_path: Path) -> None:
    words = ["settings", "wd2"]
    process = started(tmp_path, words)
    expected = (*process.communicate(timeout=100), process.returncode)
    forked = run(tmp_path, words)
    assert (forked.stdout, forked.stderr, forked.returncode) == expected and forked.returncode == 2


def test_commands_share_no_state(tmp_path: Path) -> None:
    """--debug sets a variable of the environment, with which errors have a traceback."""
    ended = [run(tmp_path, [*option, "plan", "foo"]) for option in ([], ["--debug"], [])]
    assert ["Traceback" in done.stderr for done in ended] == [False, True, False]


def processes_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found += [process.name] * (os.readlink(process / "cwd") == str(folder))
        except OSError:  # it has ended
            continue
    return found


def test_command_that_takes_too_long_is_killed_with_its_ranks(tmp_path: Path) -> None:
    words = ("profile", "hardware", "--ranks", "2", "--seconds", "100", "--device", "cpu")
    with pytest.raises(subprocess.TimeoutExpired):
        run(tmp_path, words, timeout=1.5)
    deadline = time.monotonic() + 20
    while processes_in(tmp_path):
        assert time.monotonic() < deadline, processes_in(tmp_path)
        time.sleep(0.02)


def test_commands_that_only_read_need_no_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = shared_run("small", tmp_path_factory)
    words = ["--help", "--version", "train --help", "runs .", "data info data", "settings", "recipes"]
    commands = [command.split() for command in (*words, "checkpoint list run")]
    for done, command in zip(run_without_torch(place, commands), commands, strict=True):
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
