"""Cores, memory and open files of a rank: shared with others, kept after use, and limited."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from helpers.ranks import in_forks
from vitpar.errors import LaunchError
from vitpar.launch import ALONE, join, local_ranks, resources
from vitpar.launch.local_ranks import _left, _placed
from vitpar.launch.resources import ENOUGH, LEAST, LEAST_A_RANK, allow_open_files, freed_memory_given_back
from vitpar.planner.measure.device import _resident


def says(name: str, *cores: list[int], processes: int = 1) -> tuple[str, int, list[int]]:
    """Return what a rank says of itself. cores: first and last of each run of cores."""
    return name, processes, [core for first, last in cores for core in range(first, last + 1)]


@pytest.mark.parametrize(
    ("ranks", "rank", "cores"),
    [
        ([says("a", [0, 191])] * 8, 3, 24),
        ([says("a", [24 * n, 24 * n + 23]) for n in range(8)], 3, 24),  # bound to cores of its own, as by srun
        ([says("a", [96 * (n // 4), 96 * (n // 4) + 95]) for n in range(8)], 5, 24),  # bound to a NUMA node
        ([says("a", [0, 15]), says("b", [0, 15]), says("a", [0, 15])], 1, 16),  # other machines do not count
        ([says("a", [0, 1], [8, 9]), says("a", [8, 11])], 0, 3),
        ([says("a", [0, 1])] * 8, 7, 0.25),
        ([says("a", [0, 15], processes=n) for n in range(4)], 2, 4),  # containers of one machine share its cores
    ],
)
def test_cores_are_divided_among_the_ranks_that_may_use_them(
    ranks: list[tuple[str, int, list[int]]], rank: int, cores: float
) -> None:
    assert _placed(ranks, rank).cores == pytest.approx(cores)


def test_ranks_of_one_container_share_files() -> None:
    ranks = [says("a", [0, 1]), says("b", [0, 1]), says("a", [0, 1], processes=2), says("a", [0, 1])]
    assert [_placed(ranks, rank).ranks for rank in range(4)] == [(0, 3), (1,), (2,), (0, 3)]
    assert [_placed(ranks, rank).size for rank in range(4)] == [3, 1, 3, 3]


def test_memory_is_limited_by_every_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ranks, "_CGROUPS", tmp_path)
    job = tmp_path / "job"
    task = job / "task"
    task.mkdir(parents=True)
    for group, most, used, idle in ((job, "1000", 700, 100), (task, "max", 300, 0)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\ninactive_file {idle}\nslab 3\n")
    assert list(_left("0::/job/task\n")) == [400]
    (task / "memory.max").write_text("350\n")
    assert list(_left("12:cpu:/other\n0::/job/task\n")) == [50, 400]
    assert list(_left("0::/gone\n")) == [], "a container sees its own group at the root, here without a limit"


def kept() -> float:
    """Return the share of 256 MiB that stays resident after it was freed."""
    before = _resident("VmRSS")
    for _ in range(2):
        x = torch.ones(2**26)
        del x
    return (_resident("VmRSS") - before) / 2**28


def shares() -> list[float]:
    """Return the shares in a world, inside `freed_memory_given_back`, and after it."""
    join(ALONE, "cpu")
    first = kept() if "LATER" not in os.environ else 0.0  # memory that was freed before the block may be reused inside
    with freed_memory_given_back():
        meanwhile = kept()
    return [first, meanwhile, kept()]


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="needs glibc"
)
def test_ranks_keep_freed_memory_unless_settings_forbid_it() -> None:
    environments = {
        "default": {},
        "given back": {"LATER": "1"},
        "off": {"VITPAR_KEEP_FREED_MEMORY": "0"},
        "other setting": {"MALLOC_ARENA_MAX": "2"},  # which says nothing about freed memory
        "user's setting": {"MALLOC_MMAP_THRESHOLD_": "65536"},
        "later, with the user's setting": {"LATER": "1", "MALLOC_MMAP_THRESHOLD_": "134217728"},
    }
    found = dict(zip(environments, in_forks(shares, environments.values()), strict=True))
    assert found["default"][0] > 0.9 and found["other setting"][0] > 0.9, found
    assert found["off"][0] < 0.1 and found["user's setting"][0] < 0.1, found
    assert found["given back"][1] < 0.1 < 0.9 < found["given back"][2], found
    assert found["later, with the user's setting"][1] < 0.1, found


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
