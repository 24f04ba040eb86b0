"""What the C library does with memory that was freed (glibc; elsewhere nothing of this does anything)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRIM, _MAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_NEVER = -1  # of the first
_NO_TENSOR, _LARGE, _EVERY_TENSOR = 2**30, 2**25, 2**16  # bytes from which a tensor is mapped by itself
OFF = "VITPAR_KEEP_FREED_MEMORY"
OTHERS = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")
"""What of malloc the environment may set that decides about freed memory."""


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
