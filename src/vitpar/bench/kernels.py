"""Profile of a step by torch's profiler: kernels on a GPU, operators on a CPU."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitpar.launch.world_group import all_gather_json

STEPS = 3
"""Steps that are recorded, after one that is not."""
MOST = 100
"""Number of kernels of a rank, longest first, that enter the mean over ranks."""


def record(step: Callable[[], object], device: torch.device, path: Path, matmul_rate: float) -> list[dict[str, Any]]:
    """Record some steps, write a trace for chrome://tracing or Perfetto, and return the kernels, longest first.

    Each stands for all kernels (or operators) of one name, averaged over ranks: `name`, `seconds` and `calls` per step,
    without the operators that they call, `share` of the step time, `flops` per step if the profiler knows them, and
    `limit_share`, their rate relative to that of matrix products.

    Collective; equal on all ranks. The profiler adds time to every kernel, relatively most to small ones.

    path: file for this rank's trace. matmul_rate: FLOP/s of matrix products on this rank.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every rank logs start and stop to stderr
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, with_flops=True) as profiler:
        step()
        profiler.step()
        # The first step starts with an idle device: what the warm-up step left in its queue does not count.
        _settle(device)
        begun = time.perf_counter()
        for number in range(STEPS):
            step()
            # Wait for the device before taking the time. The profiler ends the last step when the context is left.
            if number == STEPS - 1:
                _settle(device)
                seconds = (time.perf_counter() - begun) / STEPS
            else:
                profiler.step()
    profiler.export_chrome_trace(str(path))
    return _mean(_device_rows(profiler, device.type), seconds, matmul_rate)


_Row = tuple[float, float, float]
"""Seconds, calls and FLOPs of one kernel name, summed over the recorded steps."""


def _device_rows(profiler: Any, device: str) -> dict[str, _Row]:
    """Return the rows of the kernels that ran on the device, by name, longest first."""
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    flops = Counter[str]()
    if device == "cuda":
        # The profiler knows the FLOPs of operators and the kernels that each launched. The longest of these is taken
        # as the one that computes the product.
        for event in profiler.events():
            if event.flops and event.kernels:
                flops[max(event.kernels, key=lambda kernel: kernel.duration).name] += event.flops
    rows = {}
    for event in profiler.key_averages():
        if event.device_type != wanted or event.is_user_annotation:
            continue
        micro = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if micro > 0:
            rows[event.key] = (micro / 1e6, event.count, flops[event.key] if device == "cuda" else event.flops)
    longest = sorted(rows, key=lambda name: -rows[name][0])[:MOST]
    return {name: rows[name] for name in longest}


def _mean(mine: dict[str, _Row], seconds: float, matmul_rate: float) -> list[dict[str, Any]]:
    """Return the mean of the ranks' rows and seconds, per step. Collective."""
    world = dist.get_world_size()
    every = all_gather_json((mine, seconds, matmul_rate))
    step, rate = (sum(rank[place] for rank in every) / world for place in (1, 2))
    kernels = []
    for name in dict.fromkeys(name for rows, *_ in every for name in rows):
        columns = zip(*(rows.get(name, (0.0, 0.0, 0.0)) for rows, *_ in every), strict=True)
        taken, calls, flops = (sum(column) / world / STEPS for column in columns)
        known = {"flops": flops or None, "limit_share": flops / rate / taken if flops else None}
        kernels.append({"name": name, "seconds": taken, "calls": calls, "share": taken / step, **known})
    return sorted(kernels, key=lambda kernel: -kernel["seconds"])


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
