"""The ranks of one machine, and its cores and memory, which they share."""

import platform
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from vitpar.launch.resources import cores
from vitpar.launch.world_group import all_gather_json

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
    try:
        machine, processes = _BOOT.read_text(), _PROCESSES.stat().st_ino
    except OSError:  # not Linux
        machine, processes = platform.node(), 0
    return _placed(all_gather_json([machine, processes, cores()]), dist.get_rank())


def _placed(ranks: Sequence[tuple[str, int, Sequence[int]]], rank: int) -> LocalRanks:
    """Return the ranks of the machine of `rank`. ranks: machine, namespace of processes, and cores of each rank."""
    machine, processes, own = ranks[rank]
    here = [number for number, other in enumerate(ranks) if other[0] == machine]
    near = tuple(number for number in here if ranks[number][1] == processes)
    users = Counter(core for number in here for core in ranks[number][2])
    return LocalRanks(near, len(here), sum(1 / users[core] for core in own))


def available_memory() -> int | None:
    """Return the bytes that processes can still allocate here, within control groups; None if unknown."""
    try:
        memory = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        groups = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    amounts = [int(memory[1]) * 1024] if memory else []
    return min([*amounts, *_left(groups)], default=None)


def _left(groups: str) -> Iterable[int]:
    """Yield the bytes left in each limited control group outwards. groups: content of /proc/self/cgroup."""
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
