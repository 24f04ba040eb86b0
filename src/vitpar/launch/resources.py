"""Resources of a rank on its machine: GPUs, cores, open files, and memory of freed tensors."""

import ctypes
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vitpar.errors import LaunchError
from vitpar.launch.world import Device

ENOUGH = 4096
"""Open files that a process may have if its hard limit allows it: for data shards and process groups of many axes."""
LEAST, LEAST_A_RANK = 48, 3
"""Open files that ranks need to connect: a constant, and a number for each rank.

Largest numbers measured with torch 2.13: 17 plus 3 for each rank in the process that hosts the store; in a rank, 31
with 2 ranks under dp2, 49 with 4 under pp2xdp2, 63 with 8 under pp2xtp2xdp2.
"""

_TRIM, _MAP = -1, -3
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)."""
_NEVER = -1
"""Value of M_TRIM_THRESHOLD that disables trimming."""
_NO_TENSOR, _LARGE, _EVERY_TENSOR = 2**30, 2**25, 2**16
"""Values of M_MMAP_THRESHOLD: bytes from which an allocation gets its own mapping."""
OTHERS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")
"""Settings of glibc's malloc that decide when freed memory is returned to the system, if the environment sets them."""


def choose_device(name: str | None) -> Device:
    """Return the kind of device to compute on: `name`, or if None, CUDA if there is a GPU and else the CPU.

    Raises LaunchError for an unknown or missing device.
    """
    if name not in (None, "cpu", "cuda"):
        raise LaunchError(f"unknown device '{name}': use cpu or cuda")
    if name == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise LaunchError("device is 'cuda' but this machine has no CUDA GPU: use --device cpu")
    return "cpu"


def host_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cores() -> list[int]:
    """Return the cores that this process may use, sorted: fewer than the machine has if a scheduler binds it."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def cpu_cores() -> int:
    """Return the number of `cores`."""
    return len(cores())


def cpu_share(local_size: int) -> int:
    """Return the CPU threads for each of `local_size` ranks on this machine, at least 1."""
    return max(1, cpu_cores() // local_size)


def allow_open_files(ranks: int) -> None:
    """Let this process and its children open as many files as a world of `ranks` needs.

    Raises LaunchError if the hard limit does not allow it. The store would not accept the last connections, and all
    ranks would wait for each other.
    """
    least = LEAST + LEAST_A_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < least:  # RLIM_INFINITY is negative
        raise LaunchError(
            f"{ranks} ranks need {least} open files in a process, but the limit is {hard}: raise it (`ulimit -n "
            f"{least}`), or start fewer ranks"
        )
    wanted = max(least, ENOUGH) if hard < 0 else min(hard, max(least, ENOUGH))
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def keep_freed_memory() -> None:
    """Let the allocator reuse the memory of freed CPU tensors.

    By default glibc returns large blocks to the system and requests them again: thousands of page faults a step. The
    cost is that resident memory stays at its peak, which fragmentation raises. Does nothing if the environment sets
    these thresholds (MALLOC_MMAP_THRESHOLD_ and its like, GLIBC_TUNABLES), or VITPAR_KEEP_FREED_MEMORY to 0.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = any(f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}" in tunables for name in OTHERS)
    if chosen or os.environ.get("VITPAR_KEEP_FREED_MEMORY") == "0":
        return
    mallopt = _mallopt()
    # Before glibc 2.35 the mmap threshold is at most 32 MiB. If neither value is accepted, less trimming alone would
    # only make things worse.
    if mallopt and (mallopt(_MAP, _NO_TENSOR) or mallopt(_MAP, _LARGE)):
        mallopt(_TRIM, _NEVER)


@contextmanager
def freed_memory_given_back() -> Iterator[None]:
    """Return freed tensors to the system at once inside the block, so that resident memory is that of tensors. Slower.

    Memory that was freed before the block may be reused instead: enter it before anything large was computed.
    """
    mallopt = _mallopt()
    if mallopt:
        mallopt(_MAP, _EVERY_TENSOR)
        mallopt(_TRIM, 2 * _EVERY_TENSOR)
    try:
        yield
    finally:
        if mallopt:  # thresholds that glibc's own adaptation reaches
            mallopt(_MAP, _LARGE)
            mallopt(_TRIM, 2 * _LARGE)
        keep_freed_memory()


def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)
