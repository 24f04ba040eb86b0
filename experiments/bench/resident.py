"""Resident memory of this process, that is what of it is in RAM. Linux only.

Exact to pages in programs started with `ENVIRONMENT`, whose freed tensors go back to the system at once.
"""

from pathlib import Path

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc's malloc maps whatever has so many bytes on its own, and unmaps it when it is freed (mallopt(3))."""


def resident() -> int:
    """Bytes now."""
    return _bytes("VmRSS")


def most_resident() -> int:
    """The most bytes at any time, or since `forget_most`."""
    return _bytes("VmHWM")


def forget_most() -> None:
    """Begin `most_resident` anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def _bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
