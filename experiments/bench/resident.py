"""Resident memory (RSS) of this process. Linux only.

It is exact to a page in processes started with `ENVIRONMENT`: they return freed tensors to the system at once.
"""

from pathlib import Path

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc's malloc map each block of 64 KiB or more separately and unmap it when freed (mallopt(3))."""


def resident() -> int:
    """Return the current resident memory in bytes."""
    return _bytes("VmRSS")


def most_resident() -> int:
    """Return the peak resident memory in bytes since the start of the process or the last `forget_most`."""
    return _bytes("VmHWM")


def forget_most() -> None:
    """Reset the peak that `most_resident` returns (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
