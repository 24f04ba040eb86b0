"""Jobs that commands hand to the ranks they start: ranks get what was prepared, even if files have changed since."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer

from helpers.small_data import pack_small
from vitpar import launch
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.strategy import parse
from vitpar_cli import world


def work(place: launch.World, *arguments: object) -> int:
    """Return the number of arguments."""
    return len(arguments)


def handed(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> world.Job:
    """Return the job that ranks get, without starting any."""
    jobs: list[bytes] = []

    def spawn(ranks: int, argv: list[str], *, handed: bytes, **_: Any) -> int:
        assert argv[:2] == ("-P", "-m"), "files of the working folder could replace modules"
        jobs.append(handed)
        return 3

    with monkeypatch.context() as patch:
        patch.setattr(launch, "spawn", spawn)
        patch.setattr(launch, "find_world", lambda: None)
        with pytest.raises(typer.Exit) as ended:
            world.run_in_world(4, None, work, *arguments)
    assert ended.value.exit_code == 3
    return world.Job.read(jobs[0])


def test_ranks_get_arguments_and_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = parse("pp2: embed=fsdp2, *=dp2+zero1")
    job = handed(monkeypatch, plan, "more")
    assert job.arguments == (plan, "more") and job.command == sys.argv and job.run(launch.ALONE) == 2


def fails(device: torch.device) -> int:
    """Fail as a command can that finds a fault of the user on its ranks."""
    assert dist.is_initialized() and device.type == "cpu"
    raise DataError("no")


def test_command_that_fails_leaves_the_group_that_it_made() -> None:
    """A program may call `main` several times."""
    before = dict(os.environ)
    with pytest.raises(DataError, match="no"):
        world.run_in_world(1, "cpu", fails)
    assert not dist.is_initialized() and dict(os.environ) == before


def test_data_sets_are_opened_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = pack_small(tmp_path)
    shards = ShardSet.open(data, "val")
    names = [*reversed(shards.classes), "another"]
    renumbered = shards.relabelled(names, [names.index(name) for name in shards.classes])
    for images in (shards, renumbered):
        (again,) = handed(monkeypatch, images).arguments
        assert isinstance(again, ShardSet) and again is not images
        for name in ("classes", "per_class", "fingerprint"):
            assert getattr(again, name) == getattr(images, name), name
        assert again.labels.tolist() == images.labels.tolist() and again.read(0) == images.read(0)
    shards.fingerprint = "of other images"
    with pytest.raises(DataError, match="was replaced while the command started"):
        handed(monkeypatch, shards)
