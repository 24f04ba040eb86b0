"""Profile of a step by torch's profiler: kernels on a GPU, operators on a CPU."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vitpar.launch.world_group import all_gather_json

STEPS = 3  # recorded, after one that is not
MOST = 100  # of a rank that are compared with those of others


@dataclass(frozen=True)
class Kernel:
    """Time of all kernels (or operators) with one name in a step, without those that they call; the mean over ranks."""

    name: str
    seconds: float
    calls: float
    """Calls per step."""
    share: float
    """Share of the recorded step time."""
    flops: float | None
    """FLOPs per step; None where the profiler does not know them."""
    limit_share: float | None
    """Rate relative to that of measured matrix products; 1 is the limit."""


def record(step: Callable[[], object], device: torch.device, path: Path, matmul_rate: float) -> tuple[Kernel, ...]:
    """Record some steps: a trace for chrome://tracing or Perfetto in `path`, and what takes longest. Collective; equal
    for all ranks.

    matmul_rate: FLOP/s of products that a rank reaches (`Limits.matmul_rate`). The profiler itself takes time, most for
    what is small.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it says on stderr that it starts and stops, on every rank
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, with_flops=True) as profiler:
        step()
        profiler.step()
        _settle(device)
        begun = time.perf_counter()
        for number in range(STEPS):
            step()
            if number == STEPS - 1:
                _settle(device)
                seconds = (time.perf_counter() - begun) / STEPS
            else:
                profiler.step()
    profiler.export_chrome_trace(str(path))
    return _mean(_found(profiler, device.type), seconds, matmul_rate)


_Row = tuple[float, float, float]  # seconds, calls and FLOPs of all steps


def _found(profiler: Any, device: str) -> dict[str, _Row]:
    """Return what ran on the device, by name, longest first."""
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    flops = _kernel_flops(profiler) if device == "cuda" else None
    rows = {}
    for event in profiler.key_averages():
        if event.device_type != wanted or event.is_user_annotation:
            continue
        micro = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if micro > 0:
            rows[event.key] = (micro / 1e6, event.count, flops[event.key] if flops is not None else event.flops)
    longest = sorted(rows, key=lambda name: -rows[name][0])[:MOST]
    return {name: rows[name] for name in longest}


def _kernel_flops(profiler: Any) -> Counter[str]:
    """FLOPs by kernel. The profiler knows those of operators, and which kernels an operator started; the longest of
    them computes the product."""
    found: Counter[str] = Counter()
    for event in profiler.events():
        if event.flops and event.kernels:
            found[max(event.kernels, key=lambda kernel: kernel.duration).name] += event.flops
    return found


def _mean(mine: dict[str, _Row], seconds: float, matmul_rate: float) -> tuple[Kernel, ...]:
    """Return the mean over all ranks for one step."""
    world = dist.get_world_size()
    every = all_gather_json((mine, seconds, matmul_rate))
    step, rate = (sum(rank[place] for rank in every) / world for place in (1, 2))
    kernels = []
    for name in dict.fromkeys(name for rows, *_ in every for name in rows):
        columns = zip(*(rows.get(name, (0.0, 0.0, 0.0)) for rows, *_ in every), strict=True)
        taken, calls, flops = (sum(column) / world / STEPS for column in columns)
        limit_share = flops / rate / taken if flops else None
        kernels.append(Kernel(name, taken, calls, taken / step, flops or None, limit_share))
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
