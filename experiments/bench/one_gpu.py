"""Limits of one GPU (matrix products, memory) and profile of a training step (kernels, waits, phases)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from bench.ours import VitparStep
from vitpar.models import ViTConfig
from vitpar.parallel.phases import PhaseClock, untimed

SUSTAINED_S = 3.0
"""Seconds of products after which a GPU runs at the clock of training; short bursts run at a higher clock."""


def settle(device: torch.device) -> None:
    """Wait until the GPU has finished all its work; no-op on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], device: torch.device, least: float = 0.2) -> float:
    """Return the mean seconds of a call, over enough calls to take `least` seconds, after two warm-up calls."""
    run(), run()
    calls = 1
    while True:
        settle(device)
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        settle(device)
        taken = time.perf_counter() - begun
        if taken >= least:
            return taken / calls
        calls = max(2 * calls, int(calls * least / max(taken, 1e-6)))


def block_layers(config: ViTConfig) -> dict[str, tuple[int, int]]:
    """Return (input features, output features) of the linear layers of a plain block by name."""
    d = config.embed_dim
    return {"qkv": (d, 3 * d), "proj": (d, d), "fc1": (d, config.mlp_hidden_dim), "fc2": (config.mlp_hidden_dim, d)}


def matrix_products(config: ViTConfig, batch_size: int, device: torch.device) -> tuple[float, float]:
    """Return the FLOP/s of a block's linear layers in bf16, in short bursts and at the clock that the GPU sustains.

    Each has three products: its output, and the gradients of its input and weight.
    """
    rows, layers = batch_size * config.tokens, block_layers(config)
    every: list[Callable[[], None]] = []
    for inner, outer in layers.values():
        x, w, y = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((rows, inner), (outer, inner), (rows, outer))
        )

        def products(x: Tensor = x, w: Tensor = w, y: Tensor = y) -> None:
            torch.mm(x, w.t())
            torch.mm(y, w)
            torch.mm(y.t(), x)

        every.append(products)

    def all_layers() -> None:
        for products in every:
            products()

    flops = sum(6 * rows * inner * outer for inner, outer in layers.values())
    bursts = sum(seconds_of(products, device) for products in every)
    return flops / bursts, flops / seconds_of(all_layers, device, SUSTAINED_S if device.type == "cuda" else 0.2)


def bandwidth(device: torch.device, megabytes: int = 1024) -> float:
    """Return the bytes/s that a copy on the device reads and writes together."""
    source = torch.empty(megabytes * 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)


def waits(step: Callable[[], object], steps: int = 3) -> float | None:
    """Return how often a step makes the host wait for the GPU, by torch's sync debug mode; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in caught) / steps


def kernels(step: Callable[[], object], steps: int = 2) -> tuple[float, float] | None:
    """Return the kernels of a step, copies and fills included, and their total seconds; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return len(events) / steps, sum(event.device_time_total for event in events) / steps / 1e6


def phases(step: VitparStep, batch: tuple[Tensor, Tensor], device: torch.device, steps: int = 3) -> dict[str, float]:
    """Return the milliseconds of each phase of vitpar's step, by name."""
    step.model.phase = clock = PhaseClock(device)
    try:
        for _ in range(steps):
            step(*batch)
    finally:
        step.model.phase = untimed
    return {name: 1e3 * seconds / steps for name, seconds in clock.read().items()}
