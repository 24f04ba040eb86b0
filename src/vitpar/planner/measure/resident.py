"""How much memory this process takes, exactly enough to compare it with what a plan should take."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch


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
