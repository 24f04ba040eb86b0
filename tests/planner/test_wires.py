"""Prices of plans on clusters whose ranks share slow wires, compared with a replay of every rank's messages."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from helpers import wire_replay
from helpers.wire_replay import LayerWork, Machine, Message, Replay, Step
from vitpar.errors import StrategyError
from vitpar.models import model_config
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.cost.layer import LayerCosts, tensor_name
from vitpar.planner.cost.price import price
from vitpar.planner.profile.cluster import Cluster, Network, Wire
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.strategy import Plan, Strategy, batch_arithmetic, parse, stage_layers, validate
from vitpar.strategy.execution import Rules
from vitpar.strategy.layout import token_layout
from vitpar.strategy.traffic import Traffic, layer_traffic, traffic_beside_products

CLUSTERS = ((2, 4), (2, 8), (4, 4), (3, 3), (2, 6))
"""(nodes, devices of a node)."""
GBITS = (1, 10, 25)
"""Bandwidth of a node in Gb/s."""


def cluster(nodes: int, devices: int, gbits: float, nics: int) -> Cluster:
    """Return a cluster whose nodes have `nics` network cards of `gbits` Gb/s together."""
    return Cluster(
        name=f"{nodes}x{devices}",
        nodes=nodes,
        devices_per_node=devices,
        device_name="drawn",
        memory_bytes=10**11,
        matmul={"float32": 2e13},
        memory_bandwidth=1e12,
        sustained=1.0,
        intra=Wire(bandwidth=2e10, latency=5e-6),
        inter=Network(bandwidth=gbits * 1e9 / 8 / nics, latency=2e-5, nics_per_node=nics),
    )


def machine(sheet: Cluster, queued: bool = False) -> Machine:
    assert sheet.inter
    intra, inter = (wire_replay.Wire(wire.bandwidth, wire.latency) for wire in (sheet.intra, sheet.inter))
    return Machine(sheet.devices_per_node, sheet.inter.nics_per_node or sheet.devices_per_node, intra, inter, queued)


def costs_of(sheet: Cluster, depth: int = 12) -> LayerCosts:
    config = model_config("vit_custom", embed_dim=384, num_heads=12, depth=depth, patch_size=16, image_size=224)
    hardware = sheet.hardware()
    return LayerCosts(config, hardware, estimate_model(config, "fp32", hardware, tensors(config, hardware.ranks)))


def step_of(plan: Plan, costs: LayerCosts, batch_size: int) -> Step:
    """Return the work of a uniform plan: seconds of computing by the profile, and bytes of messages."""
    batch, config = batch_arithmetic(plan, batch_size), costs.config
    names, strategy = stage_layers(config, plan), plan.strategy
    stages = tuple(
        tuple(_layer(plan, strategy, config.layers[name].kind, costs, batch.microbatch_rows) for name in layers)
        for layers in names
    )
    optimizer = tuple(
        costs.model.optimizer.seconds(
            sum(layer_elements(config.kinds[config.layers[name].kind], strategy).local_numel for name in layers)
        )
        for layers in names
    )
    tokens = config.kinds[config.layers["blocks.0"].kind].gives.elements
    sent = 4 * batch.microbatch_rows * tokens * token_layout(strategy)[0].share
    return Step(plan, stages, batch.microbatches, sent, costs.model.microbatch, optimizer)


def _layer(plan: Plan, strategy: Strategy, kind: str, costs: LayerCosts, rows: int) -> LayerWork:
    layer, fsdp = costs.config.kinds[kind], strategy.degree("fsdp")
    rules = Rules(plan.pipeline_degree > 1).of(strategy, layer.name)
    profile = next(
        p
        for p in costs.model.layers
        if (p.layer, p.tensor, p.checkpoint, p.wrapped) == (kind, tensor_name(strategy), "none", rules.wrapped)
    )
    here = rows / strategy.data_parallel
    forward, backward = layer_traffic(layer, strategy, rows)
    total, products = profile.backward.seconds(here), traffic_beside_products(layer, strategy, rows)
    for collective, times, _ in products:
        backward = backward - Traffic({collective: times})
    elements = layer_elements(layer, strategy)
    assert rules.wrapped == (fsdp > 1) and not (elements.sums and rules.wrapped)
    gather, reduce = None, []
    if rules.wrapped:
        local = next(w for w in costs.model.weights if (w.layer, w.tensor) == (kind, tensor_name(strategy)))
        share, size = elements.compute_numel / local.elements, 4 * fsdp * elements.local_numel
        gather = Message("all_gather", "fsdp", size, local.gather.seconds * share)
        reduce.append(Message("reduce_scatter", "fsdp", size, local.reduce * share))
    if strategy.degree("dp") > 1:
        reduce.append(Message("all_reduce", "dp", 4 * elements.local_numel))
    return LayerWork(
        forward=profile.forward.seconds(here),
        backward=total * (1 - sum(share for _, _, share in products)),
        forward_sent=_messages(forward),
        backward_sent=_messages(backward),
        beside=tuple((total * share, _messages(Traffic({c: times}))) for c, times, share in products),
        gather=gather,
        gathers_each=rules.gathers_every_forward,
        gathers_back=rules.gathers_in_backward,
        reduce=tuple(reduce),
        reduces_at_end=rules.reduced == "end of step",
    )


def _messages(traffic: Traffic) -> tuple[Message, ...]:
    return tuple(Message(c.operation, "tp", 4 * c.elements) for c, times in traffic.items() for _ in range(times))


def uniform_plans(costs: LayerCosts, batch_size: int, inner: bool = False) -> list[Plan]:
    """Return the plans with one strategy of dp, fsdp and tp, under gpipe and 1f1b; `inner` also with pp inside them."""
    ranks, found = costs.hardware.ranks, []
    for pp in (n for n in range(1, ranks + 1) if ranks % n == 0 and n <= costs.config.num_blocks):
        size = ranks // pp
        degrees = [
            (a, b, size // a // b)
            for a in range(1, size + 1)
            if size % a == 0
            for b in range(1, size + 1)
            if size // a % b == 0
        ]
        for dp, fsdp, tp in degrees:
            axes = [f"{role}{n}" for role, n in (("dp", dp), ("fsdp", fsdp), ("tp", tp)) if n > 1] or ["dp1"]
            places = range(len(axes) + 1) if inner and pp > 1 else (0,)
            for place in places:
                words = "x".join([*axes[:place], *([f"pp{pp}"] if pp > 1 else []), *axes[place:]])
                for schedule in ("gpipe", "1f1b") if pp > 1 else ("gpipe",):
                    for microbatches in (1, 2, 4, 8):
                        plan = replace(parse(words), microbatches=microbatches)
                        if pp > 1:
                            plan = replace(plan, schedule=schedule)
                        try:
                            found.append(validate(plan, costs.config, batch_size))
                        except StrategyError:
                            continue
    return found
