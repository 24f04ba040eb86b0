"""How the cores of a machine are shared among the ranks on it."""

from __future__ import annotations

import os


def cpu_cores() -> int:
    """The cores this process may run on: fewer than the machine has where a scheduler or a container binds it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_share(local_size: int) -> int:
    """CPU threads for each of `local_size` ranks on this machine, at least 1."""
    return max(1, cpu_cores() // local_size)
