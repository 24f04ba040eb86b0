"""Resources of a rank on its machine: cores, open files, and memory of freed tensors."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vitpar.errors import LaunchError

ENOUGH = 4096
"""Open files that a process is given where its hard limit allows them: shards of data, process groups of many axes."""
LEAST, LEAST_A_RANK = 48, 3
"""Open files without which ranks do not come together.

Seen at most (torch 2.13): 17 and 3 for each rank in the process that holds the store; in a rank 31 of 2 ranks under
dp2, 49 of 4 under pp2xdp2, 63 of 8 under pp2xtp2xdp2.
"""

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_NEVER = -1  # of the first
_NO_TENSOR, _LARGE, _EVERY_TENSOR = 2**30, 2**25, 2**16  # bytes from which a tensor is mapped by itself
OFF = "VITPAR_KEEP_FREED_MEMORY"
OTHERS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")
"""Settings of malloc in the environment that decide when freed memory is returned."""


def cpu_cores() -> int:
    """The cores this process may run on: fewer than the machine has where a scheduler or a container binds it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_share(local_size: int) -> int:
    """CPU threads for each of `local_size` ranks on this machine, at least 1."""
    return max(1, cpu_cores() // local_size)


def allow_open_files(ranks: int) -> None:
    """Let this process, and those that it starts, open as many files as a world of `ranks` needs.

    Raises LaunchError where the hard limit does not allow it: the store would not take the last connections, and all
    would wait for each other.
    """
    least = LEAST + LEAST_A_RANK * ranks if ranks > 1 else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = float("inf") if hard == resource.RLIM_INFINITY else hard
    if most < least:
        raise LaunchError(
            f"{ranks} ranks need {least} open files in a process, but the limit is {hard}: raise it (`ulimit -n "
            f"{least}`), or start fewer ranks"
        )
    wanted = int(min(most, max(least, ENOUGH)))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_freed_memory() -> None:
    """Let tensors on the CPU be made where others were freed.

    Else glibc gives large ones back to the system and asks for them again: thousands of page faults a step. Resident
    memory stays at its peak, which what is left between tensors raises. Does nothing where the environment sets these
    things (MALLOC_MMAP_THRESHOLD_ and its like, GLIBC_TUNABLES), or VITPAR_KEEP_FREED_MEMORY to 0.
    """
    mallopt = _mallopt()
    # Before glibc 2.35 no more than 32 MiB are taken; without either, trimming less would only make things worse.
    if mallopt and not _chosen() and (mallopt(_MAP, _NO_TENSOR) or mallopt(_MAP, _LARGE)):
        mallopt(_TRIM, _NEVER)


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Meanwhile freed tensors go back to the system at once, so that resident memory is what tensors take. Slower.

    Not so where memory that was freed before is taken again: use it before anything large was computed.
    """
    mallopt = _mallopt()
    if mallopt:
        mallopt(_MAP, _EVERY_TENSOR)
        mallopt(_TRIM, 2 * _EVERY_TENSOR)
    try:
        yield
    finally:
        if mallopt:  # as the environment says, or where glibc itself ends up
            mallopt(_MAP, _environment("MALLOC_MMAP_THRESHOLD_", _LARGE))
            mallopt(_TRIM, _environment("MALLOC_TRIM_THRESHOLD_", 2 * _LARGE))
        keep_freed_memory()


def _chosen() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    set_by_name = any(f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}" in tunables for name in OTHERS)
    return set_by_name or os.environ.get(OFF) == "0"


def _environment(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)
