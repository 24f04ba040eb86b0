"""Commands that answer without importing torch, which takes more than a second."""

from pathlib import Path

import pytest

from helpers.command_line import run_without_torch
from helpers.shared_runs import shared_run


def test_commands_that_only_read_need_no_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    place: Path = shared_run("small", tmp_path_factory)
    words = ["--help", "--version", "train --help", "runs .", "data info data", "settings", "recipes"]
    commands = [command.split() for command in (*words, "checkpoint list run")]
    for done, command in zip(run_without_torch(place, commands), commands, strict=True):
        assert done.returncode == 0 and done.stdout, (command, done.stderr)
