"""Limit of open files: raised if allowed, otherwise one error line before anything can hang."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import clean_environment
from vitpar.errors import LaunchError
from vitpar.launch import resources
from vitpar.launch.resources import ENOUGH, LEAST, LEAST_A_RANK, allow_open_files

NEEDED = {ranks: LEAST + LEAST_A_RANK * ranks for ranks in (2, 5000)}


@pytest.mark.parametrize(
    ("ranks", "before", "after"),
    [
        (2, (20, 10_000), (ENOUGH, 10_000)),
        (2, (20, NEEDED[2]), (NEEDED[2], NEEDED[2])),
        (2, (8000, 10_000), None),
        (2, (resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
        (2, (1024, resource.RLIM_INFINITY), (ENOUGH, resource.RLIM_INFINITY)),
        (5000, (1024, 100_000), (NEEDED[5000], 100_000)),
        (1, (20, 30), (30, 30)),
    ],
)
def test_open_file_limit_is_raised(
    ranks: int, before: tuple[int, int], after: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resources.resource, "getrlimit", lambda which: before)
    monkeypatch.setattr(resources.resource, "setrlimit", lambda which, limits: given.append(limits))
    allow_open_files(ranks)
    assert given == ([] if after is None else [after])


def test_too_low_a_hard_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.resource, "getrlimit", lambda which: (20, NEEDED[2] - 1))
    with pytest.raises(LaunchError, match=r"2 ranks need 54 open files in a process, but .* 53: .*`ulimit -n 54`"):
        allow_open_files(2)


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20)); "
SPAWN = "from vitpar.launch import spawn; spawn(2, ['-c', '1'], device='cpu')"
JOIN = "from vitpar.launch import World, join; join(World(0, 2, 0, 2, 'openmpi', '127.0.0.1', 29999), 'cpu')"
MEET = "from vitpar.launch import World; from vitpar.launch.store import meeting_place; " + (
    "meeting_place(World(0, 2, 0, 2, 'openmpi', '127.0.0.1', 29999))"
)


@pytest.mark.parametrize("how", [SPAWN, JOIN, MEET])
def test_every_way_into_a_world_checks_the_limit(how: str, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LIMITED + how]
    done = subprocess.run(words, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "LaunchError: 2 ranks need 54 open files" in done.stderr


CHECK = ("check", "--mesh", "dp2", "--model", "vit_nano_patch4_16", "--batch-size", "8", "--device", "cpu")


def test_command_reports_the_limit_in_one_line(tmp_path: Path) -> None:
    program = LIMITED + "from vitpar_cli.main import main; main()"
    words = [sys.executable, "-c", program, *CHECK]
    done = subprocess.run(words, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: 2 ranks need 54 open files") and done.stderr.count("\n") == 1
