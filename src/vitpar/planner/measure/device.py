"""What the system says about a device."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch


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
