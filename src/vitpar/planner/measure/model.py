"""Measures a `ModelProfile` on one device.

Every layer runs as a plan's first rank would run it (`vitpar.planner.measure.layer`). Memory is counted, with few rows,
and grows in proportion to them.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from vitpar.launch.cores import cpu_cores
from vitpar.launch.malloc import keep_freed_memory
from vitpar.planner.measure.clock import Clock
from vitpar.planner.measure.device import device_name
from vitpar.planner.measure.layer import NAMES, LayerBench, Subject, built
from vitpar.planner.profile.curve import Curve, Timing
from vitpar.planner.profile.model import (
    CHECKPOINTS,
    Bytes,
    LayerProfile,
    ModelProfile,
    WeightProfile,
    always_wrapped,
)
from vitpar.training.optim.gradient_norm import global_norm
from vitpar.training.optim.optimizer import ShardedOptimizer, local
from vitpar.training.recipe.optimizer_section import OptimizerSection

LONGEST = {"cpu": 0.25, "cuda": 0.1}  # seconds of a layer's step at most
MOST_ROWS = 512
Progress = Callable[[int, int, str], None]
"""Called with (parts done, parts in all, what is measured next)."""


def profile_model(
    subject: Subject,
    device: torch.device,
    clock: Clock,
    processes: int = 1,
    progress: Progress = lambda done, total, words: None,
) -> ModelProfile:
    """Measure a model. Collective over the processes of `clock`; equal for all.

    processes: how many there are. Must not be called inside a process group: it pretends to be in others.
    """
    assert not dist.is_initialized(), "a process group stands in the way of pretended ones"
    if device.type == "cpu":
        keep_freed_memory()  # as ranks do
    attention = subject.choose_attention(device)
    strategies = list(subject.strategies())
    layers: list[LayerProfile] = []
    weights = []
    for number, (tensor, checkpoint, wrapped) in enumerate(strategies):
        progress(number, len(strategies) + 1, f"{tensor}{CHECKPOINTS[checkpoint]}{' wrapped' * wrapped}")
        mesh = f"{'fsdp2x' * wrapped}{tensor}{CHECKPOINTS[checkpoint]}"
        with built(subject, mesh, device) as model, model.narrow.in_place():
            for kind in NAMES:
                bench = LayerBench(model, kind)
                plain = next((p for p in layers[-3:] if p.layer == kind), None)  # measured just before, if it can be
                if wrapped and not always_wrapped(tensor) and plain:
                    layers.append(_wrapped(bench, clock, plain))
                else:
                    layers.append(_layer(bench, clock, tensor, checkpoint, wrapped))
                if wrapped and checkpoint == "none":
                    weights.append(_weights(bench, clock, tensor))
    progress(len(strategies), len(strategies) + 1, "optimizer")
    optimizer = Curve(timings=tuple(_optimizer(subject, depth, device, clock) for depth in (1, 3)))
    profile = ModelProfile(
        model=asdict(subject.config),
        device=device.type,
        device_name=device_name(device),
        precision=subject.precision,
        compiled=subject.compile_blocks,
        processes=processes,
        threads=torch.get_num_threads(),
        cores=cpu_cores() if device.type == "cpu" else processes,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=optimizer,
        microbatch=_microbatch(subject, device, clock),
        pace=clock.pace,
        measured={
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "attention": attention.backend or "torch's choice",
        },
    )
    return profile.at_pace(clock.usual)


def _layer(bench: LayerBench, clock: Clock, tensor: str, checkpoint: str, wrapped: bool) -> LayerProfile:
    forward, backward, rows = [], [], bench.unit
    while rows <= MOST_ROWS * bench.unit:
        bench.prepare(rows)
        both = clock.timings(rows, bench.forward, bench.backward)
        forward.append(both[0])
        backward.append(both[1])
        taken = sum(timing.seconds for timing in both)
        more = next((times for times in (4, 2) if times * taken < LONGEST[clock.device.type]), None)
        if more is None:
            break
        rows *= more
    share = 0.0
    if bench.kind != "stem" and checkpoint == "none":
        bench.prepare(forward[0].size)
        alone = clock.timings(1, bench.forward, bench.backward_to_input)[1].seconds
        share = min(1.0, alone / backward[0].seconds)
    (saved, space), (saved_2, space_2) = bench.memory(bench.unit), bench.memory(2 * bench.unit)
    return LayerProfile(
        layer=bench.kind,
        tensor=tensor,
        checkpoint=checkpoint,
        wrapped=wrapped,
        forward=Curve(timings=tuple(forward)),
        backward=Curve(timings=tuple(backward)),
        input_share=share,
        saved=_line(bench.unit, saved, saved_2),
        workspace=_line(bench.unit, space, space_2),
    )


def _wrapped(bench: LayerBench, clock: Clock, plain: LayerProfile) -> LayerProfile:
    """The same layer with ``fully_shard`` around it, which takes longer by as much for any rows."""
    first = plain.forward.timings[0], plain.backward.timings[0]
    bench.prepare(first[0].size)
    both = clock.timings(first[0].size, bench.forward, bench.backward)
    curves = []
    for curve, before, after in zip((plain.forward, plain.backward), first, both, strict=True):
        more = max(0.0, after.seconds - before.seconds)
        timings = (timing.model_copy(update={"seconds": timing.seconds + more}) for timing in curve.timings)
        curves.append(Curve(timings=tuple(timings)))
    return plain.model_copy(update={"wrapped": True, "forward": curves[0], "backward": curves[1]})


def _line(unit: int, once: int, twice: int) -> Bytes:
    """Bytes for `unit` rows and for twice as many, as a line."""
    return Bytes(fixed=max(0, 2 * once - twice), per_row=max(0, twice - once) / unit)


def _weights(bench: LayerBench, clock: Clock, tensor: str) -> WeightProfile:
    layer = bench.layer
    assert isinstance(layer, FSDPModule) and isinstance(layer, nn.Module)

    def gather() -> None:
        layer.reshard()
        layer.unshard()

    layer.unshard()
    elements = sum(local(p).numel() for p in layer.parameters())
    bench.prepare(bench.unit)
    taken = {}
    for sync in (False, True):
        bench.syncing(sync)
        taken[sync] = clock.timings(elements, bench.forward, bench.backward)[1].seconds
    bench.syncing(False)
    bench.forward()
    bench.backward()
    return WeightProfile(
        layer=bench.kind,
        tensor=tensor,
        elements=elements,
        gather=clock.timing(elements, gather),
        reduce=max(0.0, taken[True] - taken[False]),
    )


def _optimizer(subject: Subject, depth: int, device: torch.device, clock: Clock) -> Timing:
    """What a step does once: copies in 16 bits, the norm of the gradients, AdamW."""
    with built(replace(subject, compile_blocks=False), "dp1", device, depth) as model:
        updates = ShardedOptimizer(model.named_parameters(), OptimizerSection())
        parameters = [parameter for _, parameter in model.named_parameters()]

        def fill() -> None:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)

        def step() -> None:
            with model.narrow.in_place():
                pass
            global_norm(updates.gradients(), model)
            updates.step(1e-3)

        return clock.timings(sum(p.numel() for p in parameters), fill, step)[1]


def _microbatch(subject: Subject, device: torch.device, clock: Clock) -> float:
    """Seconds of a micro-batch that are not of its layers, on one image."""
    with built(subject, "dp1", device) as model, model.narrow.in_place():
        keys, labels = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        config, layers = model.config, 0.0
        for kind in NAMES:
            bench = LayerBench(model, kind)
            bench.prepare(1)
            layers += sum(timing.seconds for timing in clock.timings(1, bench.forward, bench.backward))
    with built(subject, "dp1", device) as model, model.narrow.in_place():
        images = torch.randn(1, config.channels, config.image_size, config.image_size, device=device)
        images = images.to(model.precision.compute)
        whole = clock.timing(1, lambda: model.run_microbatches(images, labels, keys)).seconds
    return max(0.0, whole - layers)
