"""Prices of plans on clusters whose ranks share slow wires, compared with a replay of every rank's messages."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

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
MICROBATCHES = (1, 2, 4, 8)
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


def machine(sheet: Cluster) -> Machine:
    assert sheet.inter
    intra, inter = (wire_replay.Wire(wire.bandwidth, wire.latency) for wire in (sheet.intra, sheet.inter))
    return Machine(sheet.devices_per_node, sheet.inter.nics_per_node or sheet.devices_per_node, intra, inter)


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
    rules = Rules(plan.pipeline_degree > 1).of(strategy, layer)
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


def uniform_plans(costs: LayerCosts, batch_size: int) -> list[Plan]:
    """Return the plans with one strategy of dp, fsdp and tp, under gpipe and 1f1b."""
    ranks, found = costs.hardware.ranks, []
    for pp in (n for n in range(1, ranks + 1) if ranks % n == 0 and n <= costs.config.num_blocks):
        size = ranks // pp
        parts = [n for n in range(1, size + 1) if size % n == 0]
        for dp, fsdp, tp in (degrees for degrees in product(parts, repeat=3) if math.prod(degrees) == size):
            axes = [f"{role}{n}" for role, n in (("dp", dp), ("fsdp", fsdp), ("tp", tp)) if n > 1] or ["dp1"]
            plan = parse("x".join([*([f"pp{pp}"] if pp > 1 else []), *axes]))
            for schedule, microbatches in product(("gpipe", "1f1b") if pp > 1 else ("1f1b",), MICROBATCHES):
                try:
                    made = replace(plan, schedule=schedule, microbatches=microbatches)
                    found.append(validate(made, costs.config, batch_size))
                except StrategyError:
                    continue
    return found


def drawn(count: int, seed: int = 0) -> Iterator[tuple[Cluster, LayerCosts, Plan, int]]:
    """Yield random plans on random clusters, with the costs of the cluster and a batch size."""
    chance, known = random.Random(seed), dict[tuple[int, int, int, int], tuple[Cluster, LayerCosts, list[Plan]]]()
    for _ in range(count):
        nodes, devices = chance.choice(CLUSTERS)
        key = nodes, devices, chance.choice(GBITS), chance.choice((1, devices))
        batch_size = 128 if nodes * devices % 3 else 144
        if key not in known:
            costs = costs_of(cluster(*key))
            known[key] = cluster(*key), costs, uniform_plans(costs, batch_size)
        sheet, costs, plans = known[key]
        yield sheet, costs, chance.choice(plans), batch_size


def fills_nodes(plan: Plan, devices: int) -> bool:
    """Return whether stages are on nodes of their own, or nodes hold complete stages."""
    return plan.stage_size % devices == 0 or devices % plan.stage_size == 0


@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_prices_agree_with_a_replay_of_every_message(count: int) -> None:
    """At least 29 of 30 prices are within 3 %, all within 6 %: packing for tensor parallelism is priced as wire time.

    Stages that end in the middle of a node are priced up to 20 % too slow: which cards collide is not looked up.
    """
    wrong = []
    for sheet, costs, plan, batch_size in drawn(count):
        found = price(plan, costs, batch_size).seconds
        replayed = Replay(machine(sheet), step_of(plan, costs, batch_size)).seconds()
        low, high = (-0.06, 0.06) if fills_nodes(plan, sheet.devices_per_node) else (-0.06, 0.2)
        words = (
            f"{plan} {plan.schedule} x {plan.microbatches} on {sheet.name}, {sheet.inter}: {found / replayed - 1:+.1%}"
        )
        assert low < found / replayed - 1 < high, words
        wrong += [words] if abs(found / replayed - 1) > 0.03 and high < 0.1 else []
    assert len(wrong) <= count / 30, wrong


def one_layer(work: LayerWork, words: str, **fields: float) -> Step:
    """Return a step of a plan whose stages have this layer each."""
    plan = parse(words)
    stages = ((work,),) * plan.pipeline_degree
    return Step(plan, stages, 1, fields.get("sent", 0.0), 0.0, (0.0,) * plan.pipeline_degree)


def test_replay_matches_closed_forms() -> None:
    """Two nodes of two devices, 1 GB/s between nodes, no latency."""
    free, slow = wire_replay.Wire(1e15, 0.0), wire_replay.Wire(1e9, 0.0)
    apart, shared = Machine(2, 2, free, slow), Machine(2, 1, free, slow)
    reduce = (Message("all_reduce", "dp", 1e9),)
    work = LayerWork(1.0, 2.0, reduce=reduce)
    # One ring over both nodes sends 2 · 3/4 of the bytes, spread over two cards or over one.
    assert Replay(apart, one_layer(work, "dp4")).seconds() == pytest.approx(3 + 0.75)
    assert Replay(shared, one_layer(work, "dp4")).seconds() == pytest.approx(3 + 1.5)
    # Two pairs of ranks, one on each node: each has a card, or half of one.
    pairs = replace(work, forward_sent=(), reduce=reduce)
    for machines, seconds in ((apart, 1.0), (shared, 2.0)):
        assert Replay(machines, one_layer(pairs, "dp2xfsdp2")).seconds() == pytest.approx(3 + seconds)
    # Two stages of two ranks: the message there, and the one back.
    for machines, seconds in ((apart, 1.0), (shared, 2.0)):
        piped = one_layer(LayerWork(1.0, 2.0), "pp2xdp2", sent=1e9)
        assert Replay(machines, piped).seconds() == pytest.approx(6 + 2 * seconds)
    # The message back shares the card with the gradients of the stage that sends it: those of an axis across nodes.
    crossing = one_layer(LayerWork(1.0, 2.0, reduce=reduce), "dp2xpp2", sent=0.0)
    assert Replay(shared, crossing).seconds() == pytest.approx(6 + 1.0)
    tensor = LayerWork(1.0, 2.0, forward_sent=(Message("all_gather", "tp", 1e9),))
    assert Replay(shared, one_layer(tensor, "tp2xdp2")).seconds() == pytest.approx(3 + 1.0)
