"""Load of a GPU, as nvidia-smi shows it, where the package nvidia-ml-py is installed."""

from __future__ import annotations

from functools import cache

import torch


def device_load(device: torch.device) -> tuple[float, float] | None:
    """Return the share of the last second or less in which a kernel ran on `device`, and its power in watts.

    None for a CPU, and where NVML does not report it. Takes about a millisecond.
    """
    if device.type != "cuda" or not _answers(device):
        return None
    return torch.cuda.utilization(device) / 100, torch.cuda.power_draw(device) / 1000


@cache
def _answers(device: torch.device) -> bool:
    """Return whether NVML reports the load of `device`. It needs its package, and rights that containers may lack."""
    try:
        torch.cuda.utilization(device)
        torch.cuda.power_draw(device)
    except Exception:  # NVML's errors are classes of a package that may be missing
        return False
    return True
