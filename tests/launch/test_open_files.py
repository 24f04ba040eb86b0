"""Limit of open files: raised if allowed, otherwise one error line before anything can hang."""

import io
import resource
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import pytest

from helpers.ranks import in_forks
from vitpar.errors import LaunchError
from vitpar.launch import World, join, resources, spawn
from vitpar.launch.resources import ENOUGH, LEAST, LEAST_A_RANK, allow_open_files
from vitpar.launch.store import meeting_place

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


WORLD = World(0, 2, 0, 2, "openmpi", "127.0.0.1", 29999)
WAYS: dict[str, Callable[[], Any]] = {
    "spawn": lambda: spawn(2, ["-c", "1"], device="cpu"),
    "join": lambda: join(WORLD, "cpu"),
    "meet": lambda: meeting_place(WORLD),
}
CHECK = ("check", "--mesh", "dp2", "--model", "vit_nano_patch4_16", "--batch-size", "8", "--device", "cpu")


def limited() -> dict[str, str]:
    """Return the error of every way into a world, and what a command prints, in a process of at most 20 open files."""
    from vitpar_cli.main import main

    resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    said = {}
    for name, enter in WAYS.items():
        with pytest.raises(LaunchError) as refused:
            enter()
        said[name] = str(refused.value)
    sys.argv = ["vitpar", *CHECK]
    with redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ended:
        main()
    return {**said, "command": errors.getvalue(), "exit code": str(ended.value.code)}


def test_every_way_into_a_world_checks_the_limit() -> None:
    (said,) = in_forks(limited, [{}])
    sentence = "2 ranks need 54 open files in a process, but the limit is 20: raise it"
    assert all(said[name].startswith(sentence) for name in WAYS), said
    assert said["exit code"] == "2"
    assert said["command"].startswith(f"error: {sentence}") and said["command"].count("\n") == 1
