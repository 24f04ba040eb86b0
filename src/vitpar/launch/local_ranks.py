"""The ranks of one machine, and its cores and memory, which they share."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vitpar.launch.resources import cores
from vitpar.launch.world_group import Json, all_gather_json

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine
_PROCESSES = Path("/proc/self/ns/pid")
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class LocalRanks:
    """Place of this rank among those of its machine."""

    ranks: tuple[int, ...]
    """Ranks of this machine that can open each other's files in /proc, in order: all, or those of one container."""
    size: int
    """Number of all ranks of this machine."""
    cores: float
    """Cores of this rank. A core that several ranks may use is divided among them."""


def local_ranks() -> LocalRanks:
    """Return the ranks of this rank's machine. Collective.

    Launchers may bind each rank to cores of its own, or none, so ranks compare the cores that they may use.
    """
    mine: dict[str, Json] = {"machine": _name(_BOOT), "processes": _namespace(), "cores": _ranges(cores())}
    return _placed(all_gather_json(mine), dist.get_rank())


def _placed(ranks: Sequence[Any], rank: int) -> LocalRanks:
    """Return the ranks of the machine of `rank`.

    ranks: what each rank says of itself.
    """
    own = ranks[rank]
    here = [number for number, other in enumerate(ranks) if other["machine"] == own["machine"]]
    near = tuple(number for number in here if ranks[number]["processes"] == own["processes"])
    users: dict[int, int] = {}
    for number in here:
        for first, last in ranks[number]["cores"]:
            for core in range(first, last + 1):
                users[core] = users.get(core, 0) + 1
    share = sum(1 / users[core] for first, last in own["cores"] for core in range(first, last + 1))
    return LocalRanks(near, len(here), share)


def _name(boot: Path) -> str:
    try:
        return boot.read_text().strip()
    except OSError:  # not Linux
        return platform.node()


def _namespace() -> int:
    try:
        return _PROCESSES.stat().st_ino
    except OSError:
        return 0


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return sorted numbers as [first, last] of each run without a gap, which is short for hundreds of cores."""
    breaks = [place for place, (a, b) in enumerate(pairwise(numbers), start=1) if b != a + 1]
    return [
        [numbers[start], numbers[stop - 1]] for start, stop in zip([0, *breaks], [*breaks, len(numbers)], strict=True)
    ]


def available_memory() -> int | None:
    """Return the bytes that processes can still allocate on this machine, within the limits of its control groups.

    None if the system does not say it.
    """
    try:
        memory = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    amounts = [int(memory[1]) * 1024] if memory else []
    return min([*amounts, *_left(groups)], default=None)


def _left(groups: str) -> Iterable[int]:
    """Yield the bytes that are left in each control group with a limit, from this process's outwards.

    groups: content of /proc/self/cgroup.
    """
    path = re.search(r"^0::/(.*)$", groups, re.MULTILINE)
    own = _CGROUPS / path[1] if path and (_CGROUPS / path[1]).is_dir() else _CGROUPS  # a container sees its own as root
    for group in (own, *own.parents):
        try:
            most, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
            # Files that were read long ago count as used, but make room.
            idle = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        if most.isdecimal():
            yield max(0, int(most) - used + (int(idle[1]) if idle else 0))
