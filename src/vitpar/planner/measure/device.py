"""A device: its name, its memory, and how much of that this process takes."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found.group(1) if found else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """All of the GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def date_and_versions() -> dict[str, str]:
    """When something is measured, and under which versions: notes of a profile."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"date": date, "torch": torch.__version__, "python": platform.python_version()}


class Peak:
    """The most bytes since this was made. None where the system does not tell (it does on GPUs and under Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            if hasattr(ctypes.CDLL(None), "malloc_trim"):
                ctypes.CDLL(None).malloc_trim(0)
            self._before = _resident("VmRSS")

    def forget(self) -> None:
        """Only what comes from here on counts, beside what was there at first."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # proc(5)

    @property
    def grown(self) -> int | None:
        """Bytes more than at first."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - (self._before or 0)
        most = _resident("VmHWM")
        return None if most is None or self._before is None else most - self._before


def _resident(key: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    lines = status.read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


class LiveBytes(TorchDispatchMode):
    """While it is entered: how many bytes of what operations made since then are still there, and were at most.

    What an operation takes and gives back within itself is not seen. Compiled code runs uncompiled meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        """Bytes that are there."""
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        return sum(size for _, size in self._storages.values())

    def restart(self) -> None:
        """Forget the most so far."""
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given:
                    self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.now)
        return result


class AllocatedBytes:
    """Bytes that were requested from a GPU's allocator, by compiled code and inside operations too."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    @property
    def now(self) -> int:
        """Bytes that are there."""
        return self._asked("current")

    @property
    def most(self) -> int:
        """Bytes that were there at most."""
        return self._asked("peak")

    def restart(self) -> None:
        """Forget the most so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def __enter__(self) -> Self:
        self.restart()
        self._before = 0
        self._before = self.now
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def _asked(self, when: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{when}"] - self._before


def live_bytes(device: torch.device) -> LiveBytes | AllocatedBytes:
    """Return the counter of live bytes for `device`."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()
