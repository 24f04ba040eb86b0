"""Measurement of a `ModelProfile` on one device.

Every layer runs as the first rank of a plan would run it (`LayerBench`), so one device is enough for the shapes of
every strategy of the runtime. Memory is measured at the smallest and the largest number of rows that are timed, and
taken as linear between and beyond them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from vitpar.launch.resources import keep_freed_memory
from vitpar.models.config import ModelConfig
from vitpar.models.families import config_to_json
from vitpar.models.layers import zero_sides
from vitpar.parallel import Execution
from vitpar.parallel.attention import choose_attention
from vitpar.parallel.precision import resolve_precision
from vitpar.planner.measure.clock import Clock, Progress
from vitpar.planner.measure.device import date_and_versions, device_name
from vitpar.planner.measure.layer_bench import LayerBench, built, pretended, random_input, targets_for
from vitpar.planner.profile.curves import Curve, Timing
from vitpar.planner.profile.estimate import tensors
from vitpar.planner.profile.profiles import (
    CHECKPOINTS,
    Bytes,
    LayerProfile,
    ModelProfile,
    WeightProfile,
    always_wrapped,
)
from vitpar.recipe.sections.training import OptimizerSection
from vitpar.sharded import local
from vitpar.strategy import parse, validate
from vitpar.training.optim.norms import clip_factor, global_norm
from vitpar.training.optim.one_pass import choose_implementation
from vitpar.training.optim.optimizer import ShardedOptimizer

CHOSEN_FOR = 64  # images of the micro-batch for which the attention kernel is chosen
LONGEST = {"cpu": 2.5, "cuda": 1.0}  # forward and backward of a point take this many times the seconds for it at most
MOST_GRAPHS = 10_000
"""Limit of graphs of a compiled block, over all strategies."""
BEND = 16
"""Number of rows, in units of `LayerBench.unit`, from which a GPU may no longer wait for the host."""
MOST_ROWS = 512
"""Largest number of rows to measure, in units of `LayerBench.unit`."""


def profile_model(
    config: ModelConfig,
    execution: Execution,
    ranks: int,
    clock: Clock,
    processes: int = 1,
    attention: str = "auto",
    progress: Progress = lambda done, total, words: None,
) -> ModelProfile:
    """Measure a model. Collective over the processes of `clock`; equal for all.

    execution: settings of a step, with any batch size.
    ranks: largest number of ranks of a stage, up to which tensor-parallel modes are measured.
    clock: timer, with the device and the processes that measure at the same time.
    processes: how many these are.
    attention: attention kernel, as in recipes.
    progress: called before each strategy.

    Must not be called inside a process group, because it creates fake ones.
    """
    assert not dist.is_initialized(), "a process group is initialized already"
    device = clock.device
    if device.type == "cpu":
        keep_freed_memory()  # as ranks do
    plan, precision = validate(parse("dp1"), config, CHOSEN_FOR), resolve_precision(execution.precision)
    with pretended(1):
        chosen = choose_attention(attention, config, plan, CHOSEN_FOR, precision, device)
    if execution.compile:
        # Every number of rows is a graph, and beyond the limit blocks run eagerly.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
    measured = list(strategies(config, ranks, execution.compile))
    layers: list[LayerProfile] = []
    weights = []
    for number, (tensor, checkpoint, wrapped) in enumerate(measured):
        progress(number, len(measured) + 1, f"{tensor}{CHECKPOINTS[checkpoint]}{' under fsdp' * wrapped}")
        mesh = f"{'fsdp2x' * wrapped}{tensor}{CHECKPOINTS[checkpoint]}"
        with built(config, execution, mesh, device) as model, model.low_precision_params.in_place():
            for kind in model.config.kinds:
                bench = LayerBench(model, kind)
                # The same strategy without fully_shard was measured just before, where it exists.
                plain = next((p for p in layers[-len(model.config.kinds) :] if p.layer == kind), None)
                if wrapped and not always_wrapped(tensor) and plain:
                    layers.append(_wrapped(bench, clock, plain))
                else:
                    layers.append(_layer(bench, clock, tensor, checkpoint, wrapped))
                if wrapped and checkpoint == "none":
                    weights.append(_weights(bench, clock, tensor))
    progress(len(measured), len(measured) + 1, "optimizer")
    optimizer = Curve(timings=tuple(_optimizer(config, execution, blocks, clock) for blocks in (1, 3)))
    return ModelProfile(
        model=config_to_json(config),
        device=device.type,
        device_name=device_name(device),
        precision=execution.precision,
        fp8_min_features=execution.fp8_min_features,
        compiled=execution.compile,
        processes=processes,
        layers=tuple(layers),
        weights=tuple(weights),
        optimizer=optimizer,
        microbatch=_microbatch(config, execution, clock),
        measured={**date_and_versions(), "attention": chosen.backend or "torch's choice"},
    )


def strategies(config: ModelConfig, ranks: int, compiled: bool) -> Iterator[tuple[str, str, bool]]:
    """Yield (tensor, checkpoint, wrapped) of all layer profiles to measure, as `LayerProfile` names them."""
    for tensor, checkpoint in product(tensors(config, ranks), CHECKPOINTS):
        if not (checkpoint == "selective" and compiled):
            yield from (
                (tensor, checkpoint, wrapped) for wrapped in (False, True) if wrapped or not always_wrapped(tensor)
            )


def _layer(bench: LayerBench, clock: Clock, tensor: str, checkpoint: str, wrapped: bool) -> LayerProfile:
    """Measure a layer at rising numbers of rows, until the next would take too long."""
    forward, backward, rows = [], [], bench.unit
    while rows <= MOST_ROWS * bench.unit:
        bench.prepare(rows)
        both = clock.timings(rows, bench.forward, bench.backward)
        forward.append(both[0])
        backward.append(both[1])
        taken = sum(timing.seconds for timing in both)
        # A GPU's time has a bend where it no longer waits for the host: points are closer there.
        larger = (2,) if clock.device.type == "cuda" and rows >= BEND * bench.unit else (4, 2)
        more = next((times for times in larger if times * taken < LONGEST[clock.device.type] * clock.seconds), None)
        if more is None:
            break
        rows *= more
    share = 0.0
    if bench.layer.description.takes and checkpoint == "none":
        bench.prepare(forward[0].size)
        alone = clock.timings(1, bench.forward, bench.backward_to_input)[1].seconds
        share = min(1.0, alone / backward[0].seconds)
    # Transient bytes are the most of several lines, of which gradients of weights are the largest for few rows.
    few, many = bench.unit, max(2 * bench.unit, forward[-1].size)
    (saved, space), (saved_2, space_2) = bench.memory(few), bench.memory(many)
    return LayerProfile(
        layer=bench.kind,
        tensor=tensor,
        checkpoint=checkpoint,
        wrapped=wrapped,
        forward=Curve(timings=tuple(forward)),
        backward=Curve(timings=tuple(backward)),
        input_share=share,
        saved=_line((few, saved), (many, saved_2)),
        workspace=_line((few, space), (many, space_2)),
    )


def _wrapped(bench: LayerBench, clock: Clock, plain: LayerProfile) -> LayerProfile:
    """Return the profile of the layer under ``fully_shard``.

    It is that of the plain layer with the hooks' time, measured once: it is the same for any number of rows. A GPU
    computes a few rows while it waits for the host, so there the time of these is the host's, hooks included.
    """
    first = plain.forward.timings[0], plain.backward.timings[0]
    bench.prepare(first[0].size)
    both = clock.timings(first[0].size, bench.forward, bench.backward)
    curves = []
    for curve, before, after in zip((plain.forward, plain.backward), first, both, strict=True):
        more, host = max(0.0, after.seconds - before.seconds), clock.device.type == "cuda"
        seconds = (max(t.seconds, after.seconds) if host else t.seconds + more for t in curve.timings)
        pairs = zip(curve.timings, seconds, strict=True)
        curves.append(Curve(timings=tuple(timing.model_copy(update={"seconds": s}) for timing, s in pairs)))
    return plain.model_copy(update={"wrapped": True, "forward": curves[0], "backward": curves[1]})


def _line(few: tuple[int, int], many: tuple[int, int]) -> Bytes:
    """Return the line through two pairs of rows and bytes, neither falling nor below 0."""
    per_row = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
    return Bytes(fixed=max(0.0, few[1] - per_row * few[0]), per_row=per_row)


def _weights(bench: LayerBench, clock: Clock, tensor: str) -> WeightProfile:
    """Measure the time to gather parameters and to reduce gradients, apart from communication, which is fake.

    On a GPU it is that of kernels: `_wrapped` has the host's.
    """
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
        taken[sync] = clock.timings(elements, bench.forward, bench.backward, host=False)[1].seconds
    bench.syncing(False)
    bench.forward()
    bench.backward()
    return WeightProfile(
        layer=bench.kind,
        tensor=tensor,
        elements=elements,
        gather=clock.timings(elements, gather, host=False)[0],
        reduce=max(0.0, taken[True] - taken[False]),
    )


def _optimizer(config: ModelConfig, execution: Execution, blocks: int, clock: Clock) -> Timing:
    """Time the work done once per step: 16-bit copies, the norm of the gradients, AdamW.

    blocks: number of copies of each kind of block, which sets the number of elements.
    """
    names = tuple(layer.name for layer in config.block_kinds) * blocks
    with built(config, replace(execution, compile=False), "dp1", clock.device, names) as model:
        implementation = choose_implementation(OptimizerSection(), execution.precision, clock.device).name
        updates = ShardedOptimizer(model.named_parameters(), OptimizerSection(), implementation=implementation)
        parameters = [parameter for _, parameter in model.named_parameters()]

        gradients = [torch.zeros_like(parameter) for parameter in parameters]

        def step() -> None:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient  # every step drops it
            with model.low_precision_params.in_place():
                pass
            norm = global_norm(updates.gradients(), model)
            if updates.one_pass:
                updates.step_in_one_pass(1e-3, clip_factor(norm, 1.0), model.low_precision_params, None)
            else:
                updates.step(1e-3)

        # A few blocks take the host longer than the GPU, but in a training step the host is ahead by then.
        return clock.timings(sum(p.numel() for p in parameters), step, host=False)[0]


def _microbatch(config: ModelConfig, execution: Execution, clock: Clock) -> float:
    """Return the seconds of a micro-batch of one image beyond those of its layers."""
    device, layers = clock.device, 0.0
    (begin, *blocks, end) = config.layer_names
    first = config.layers[blocks[0]]
    # Where the first block fits between embed and head it is the only one, so that little is subtracted.
    fits = first.gives == config.layers[end].takes
    names = tuple(blocks[:1] if fits else blocks)
    counts = Counter(config.layers[name].kind for name in (begin, *names, end))
    with built(config, execution, "dp1", device, names) as model, model.low_precision_params.in_place():
        sides = zero_sides(config, 1, device)
        for kind, times in counts.items():
            bench = LayerBench(model, kind)
            bench.prepare(1)
            layers += times * sum(timing.seconds for timing in clock.timings(1, bench.forward, bench.backward))
    with built(config, execution, "dp1", device, names) as model, model.low_precision_params.in_place():
        images = random_input((1, *config.input.shape), config, model.precision.compute, device)
        keys, targets = sides.pop("keys", None), targets_for(model, 1, 1)
        whole = clock.timings(1, lambda: model.run_microbatches(images, targets, keys, **sides))[0].seconds
    return max(0.0, whole - layers)
