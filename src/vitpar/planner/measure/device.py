"""Name and memory of a device, and the memory that this process uses."""

from __future__ import annotations

import ctypes
import gc
import platform
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitpar.launch.resources import host_memory


def device_name(device: torch.device) -> str:
    """Return the name of the GPU or the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return match.group(1) if match else platform.processor() or platform.machine()


def memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory of the GPU, or of the complete machine for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


def date_and_versions() -> dict[str, str]:
    """Return notes for a profile: today's date (UTC) and the versions of torch and Python."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"date": date, "torch": torch.__version__, "python": platform.python_version()}


class Peak:
    """Peak memory of this process since the object was created, on GPUs and under Linux."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            # Freed memory that the allocator keeps would hide growth of the resident size.
            if hasattr(ctypes.CDLL(None), "malloc_trim"):
                ctypes.CDLL(None).malloc_trim(0)
            self._before = _resident("VmRSS")

    def forget(self) -> None:
        """Reset the peak to the current use; `grown` still counts from the object's creation."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)

    @property
    def grown(self) -> int | None:
        """Return the peak bytes above those at creation; None where the system does not report them."""
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
    """Counter of the live bytes of tensors that operations allocate while the mode is active.

    Memory that an operation allocates and frees internally is not seen. Compiled code runs uncompiled in this mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    @property
    def now(self) -> int:
        """Return the bytes that are live now."""
        self._storages = {key: pair for key, pair in self._storages.items() if not pair[0].expired()}
        return sum(size for _, size in self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                # Views and in-place results share the storage of an input, which is no new memory.
                if storage._cdata not in given:
                    self._storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, self.now)
        return result


class AllocatedBytes:
    """Counter of the bytes requested from a GPU's caching allocator, by compiled code and inside operations too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = self._asked("current")
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def now(self) -> int:
        """Return the bytes that are live now."""
        return self._asked("current") - self._before

    @property
    def most(self) -> int:
        """Return the peak of the live bytes."""
        return self._asked("peak") - self._before

    def _asked(self, when: str) -> int:
        return torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{when}"]


def live_bytes(device: torch.device) -> LiveBytes | AllocatedBytes:
    """Return the counter of live bytes for `device`."""
    return AllocatedBytes(device) if device.type == "cuda" else LiveBytes()
