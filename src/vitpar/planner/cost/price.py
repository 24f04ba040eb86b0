"""Price of a plan: seconds and bytes of a step.

Replays the micro-batches of all stages in the schedule's order, then the sums, the norm and the optimizer that follow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise

from vitpar.models.config import ModelConfig
from vitpar.models.description import layer_of
from vitpar.models.roles import parameter_splits
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.cost.links import (
    RankGroup,
    Wires,
    all_ranks,
    hop,
    placed,
    sharing_group,
    stage_place,
    stage_wires,
)
from vitpar.planner.cost.memory import Memory, peak_memory
from vitpar.planner.cost.pipeline import ActionCost, Event, replay
from vitpar.planner.cost.records import PlacedStrategy
from vitpar.planner.cost.stage import StageCost, Streams, build_stage
from vitpar.planner.profile.profiles import LayerKind
from vitpar.strategy import (
    Axis,
    BatchArithmetic,
    Plan,
    Strategy,
    batch_arithmetic,
    image_layout,
    rank_of_stage,
    stage_layers,
    stages_of_rank,
)
from vitpar.strategy.layout import Layout, mesh_axes, sharding_axes
from vitpar.strategy.pipeline_orders import ActionOrder, action_order
from vitpar.strategy.stages import sharing_places, travel_layout
from vitpar.text import count, size

Travel = tuple[Layout | None, ...]
"""Layouts of tokens between stages: entry n is the input of stage n. None for the input of the first stage and the
output of the last."""


def schedule_words(plan: Plan) -> str:
    """Return the schedule with a leading space, as in `` 1f1b``; empty without a pipeline."""
    return f" {plan.schedule}" if plan.pipeline_degree > 1 else ""


def plan_title(plan: Plan) -> str:
    """Return a plan's title, as in `pp2xdp4 1f1b, 4 micro-batches`."""
    return f"{plan}{schedule_words(plan)}, {count(plan.microbatches or 1, 'micro-batch')}"


@dataclass(frozen=True, repr=False)
class Price:
    """Predicted time and memory of one step of a plan."""

    plan: Plan
    """The priced plan."""
    batch_size: int
    """Images of a step over all ranks."""
    seconds: float
    """Seconds of a step."""
    time: Mapping[str, float]
    """Breakdown of `seconds` by purpose, on the pipeline rank that waits least for others."""
    memory: tuple[Memory, ...]
    """Peak memory of the fullest rank at each index of the pp axis."""
    events: tuple[Event, ...]
    """Actions of the pipeline ranks with their times; empty without a pipeline."""
    rank_times: tuple[Mapping[str, float], ...] = ()
    """Breakdown of `seconds` by purpose, at each index of the pp axis."""

    @property
    def images_per_second(self) -> float:
        """Return the throughput in images per second over all ranks."""
        return self.batch_size / self.seconds

    @property
    def memory_bytes(self) -> float:
        """Return the peak bytes of the fullest rank."""
        return max(memory.total for memory in self.memory)

    def __repr__(self) -> str:
        speed = f"{self.images_per_second:,.0f} samples/s in batches of {self.batch_size:,}"
        return f"Price({plan_title(self.plan)}: {speed}, {size(self.memory_bytes)} a rank)"

    def mfu(self, costs: LayerCosts) -> float | None:
        """Return the model FLOPs utilisation, 0 to 1; None if the peak rate of a device is unknown.

        It is the FLOPs of the model's matrix products over those that all devices could compute in the step.
        """
        peak = costs.hardware.peaks.get(costs.precision.compute.name)
        return peak and costs.config.flops * self.images_per_second / (peak * self.plan.world_size)


def price(plan: Plan, costs: LayerCosts, batch_size: int, moments: float = 2) -> Price:
    """Return the price of a plan under default communication settings.

    plan: validated for the model and the batch.
    batch_size: images of a step over all ranks.
    moments: bytes of optimizer state per byte of parameters; 2 for AdamW.

    Raises PlannerError if the profiles lack a measurement that the plan needs.
    """
    batch = batch_arithmetic(plan, batch_size)
    stages = _stages(plan, costs, batch.microbatch_rows)
    if plan.pipeline_degree == 1:
        done, spent, events = _alone(stages[0], batch.microbatches, costs)
    else:
        done, spent, events = _pipelined(plan, stages, batch.microbatches, batch.microbatch_rows, costs)
    seconds, busiest = _finish(plan, stages, done, spent, costs)
    if teacher := costs.teacher_seconds(batch_size, plan.world_size):
        seconds += teacher
        for parts in spent:
            parts["teacher"] = teacher
        events = [event.later(teacher) for event in events]
    rank_times = tuple(map(dict, spent))
    memories = _memory(plan, stages, costs, batch, moments)
    return Price(plan, batch_size, seconds, rank_times[busiest], memories, tuple(events), rank_times)


def memory_bytes(plan: Plan, costs: LayerCosts, batch_size: int, moments: float = 2) -> float:
    """Return `Price.memory_bytes` of a plan without pricing its time, which is much quicker for pipelines."""
    return max(place_bytes(plan, costs, batch_size, moments))


def place_bytes(plan: Plan, costs: LayerCosts, batch_size: int, moments: float = 2) -> tuple[float, ...]:
    """Return the peak bytes of the fullest rank at each index of the pp axis."""
    batch = batch_arithmetic(plan, batch_size)
    memories = _memory(plan, _stages(plan, costs, batch.microbatch_rows), costs, batch, moments)
    return tuple(memory.total for memory in memories)


def _memory(
    plan: Plan, stages: list[StageCost], costs: LayerCosts, batch: BatchArithmetic, moments: float
) -> tuple[Memory, ...]:
    """Return the peak memory of the fullest rank at each index of the pp axis."""
    few = batch.microbatches
    if plan.pipeline_degree == 1:
        few = min(few, 3)  # a first, a middle and a last micro-batch: all between are like the middle one
        order: ActionOrder = {0: [[(computation, 0, n)] for n in range(few) for computation in "FB"]}
    else:
        order = _actions(plan.schedule, plan.pipeline_degree, plan.virtual_stages, few)
    buffers, memories = _buffers(plan, costs, batch), []
    reserved, teacher = costs.hardware.reserved_bytes, costs.teacher_bytes(plan.world_size)
    for pp in range(plan.pipeline_degree):
        mine = {number: stages[number] for number in stages_of_rank(pp, plan)}
        kept = sum(buffers[number] for number in mine)
        peak = peak_memory(mine, order[pp], few, moments)
        memories.append(replace(peak, buffers=kept, reserved=reserved, teacher=teacher))
    return tuple(memories)


@lru_cache(maxsize=4096)
def _actions(schedule: str, pp: int, virtual_stages: int, microbatches: int) -> ActionOrder:
    """Return the actions of every rank of a pipeline, in order."""
    return action_order(Plan(pp=pp, schedule=schedule, virtual_stages=virtual_stages), microbatches)


Times = tuple[list[float], list[dict[str, float]], list[Event]]
"""(seconds until the last backward and the gradients that it sent are done, their breakdown by purpose, actions of a
pipeline) of a step until gradients are reduced: the first two for each index of the pp axis."""


@lru_cache(maxsize=64)
def _laid_out(plan: Plan, config: ModelConfig) -> tuple[tuple[tuple[tuple[LayerKind, Strategy], ...], ...], Travel]:
    """Return (kind, strategy) of each stage's layers, and the layouts of tokens between stages."""
    strategies = plan.strategies(config.layer_names)
    kinds = {name: layer.kind for name, layer in config.layers.items()}
    stages = tuple(tuple((kinds[name], strategies[name]) for name in names) for names in stage_layers(config, plan))
    travel = (travel_layout(before[-1][1], behind[0][1]) for before, behind in pairwise(stages))
    return stages, (None, *travel, None)


def _stages(plan: Plan, costs: LayerCosts, rows: int) -> list[StageCost]:
    stages, travel = _laid_out(plan, costs.config)
    indices = [stage_place(plan, pp, costs.hardware.ranks_per_node) for pp in range(plan.pipeline_degree)]
    where = [PlacedStrategy(*placed(plan), plan.splits_backward, index) for index in indices]
    return [
        build_stage(costs, layers, rows, where[rank_of_stage(number, plan)], taken=taken, given=given)
        for number, (layers, (taken, given)) in enumerate(zip(stages, pairwise(travel), strict=True))
    ]


def _travelling(plan: Plan, config: ModelConfig) -> list[float]:
    """Return the elements of one image that a rank sends between stages, with 0 before the first and after the last."""
    stages, travel = _laid_out(plan, config)
    given = (0, *(config.kinds[stage[-1][0]].gives.elements for stage in stages[:-1]), 0)
    return [layout[0].share * elements if layout else 0.0 for layout, elements in zip(travel, given, strict=True)]


def _alone(stage: StageCost, microbatches: int, costs: LayerCosts) -> Times:
    """Replay the micro-batches of a plan without a pipeline."""
    streams, repeats, skipped = Streams(costs.hardware.overlap), max(0, microbatches - 4), 0.0
    for number in range(microbatches - repeats):
        begun, before, queued = streams.at, dict(streams.spent), streams.backlog
        stage.forward(streams, number == 0)
        stage.backward(streams, number == microbatches - repeats - 1)
        streams.block(costs.model.microbatch, "other")
        if number == 2 and repeats:
            # The middle micro-batches are alike: the third stands for all. The first gathers for the step, and only
            # from the second on may a backlog of transfers carry over.
            skipped, late = repeats * (streams.at - begun), streams.backlog
            for what, seconds in streams.spent.items():
                streams.spent[what] += repeats * (seconds - before.get(what, 0.0))
            # If links are slower than computing, the backlog grows with every micro-batch.
            for (lane, across), seconds in list(late.items()) * repeats:
                streams.send(seconds - queued.get((lane, across), 0.0), lane, across)
    streams.wait(None, "gradients")
    return [streams.at + skipped], [streams.spent], []


def _pipelined(plan: Plan, stages: list[StageCost], microbatches: int, rows: int, costs: LayerCosts) -> Times:
    """Replay the actions of a pipeline. rows: images of a micro-batch."""
    hardware, last = costs.hardware, microbatches - 1
    overhead = costs.model.microbatch / 2 + hardware.pipeline  # of a forward, or of a backward
    places = [rank_of_stage(number, plan) for number in range(plan.num_stages)]
    nodes = hardware.ranks_per_node, hardware.nics_per_node
    travelling = _travelling(plan, costs.config)

    @cache
    def priced(computation: str, number: int, special: bool) -> tuple[ActionCost, dict[str, float]]:
        """Return an action's cost and the breakdown of its seconds."""
        streams, stage = Streams(hardware.overlap), stages[number]
        late = stage.late
        if computation == "F":
            stage.forward(streams, special)
        elif computation == "W":
            streams.compute(late, "backward")
        else:
            stage.backward(streams, special)
        # I is a complete backward without the part that W computes later.
        if computation == "I":
            streams.at -= late
            streams.spent["backward"] -= late
        streams.block(overhead, "other")
        # Collectives cross nodes in a share of the action's time.
        share = min(1.0, streams.crossing / streams.at) if streams.at else 0.0
        across = any(across for _, across in streams.backlog)
        wires = stage_wires(plan, places[number], *nodes)
        return ActionCost(streams.at, wires, share, streams.left, across), streams.spent

    def action(computation: str, number: int, microbatch: int) -> tuple[ActionCost, dict[str, float]]:
        # The first forward gathers for the complete step, the last backward reduces. All others are alike.
        return priced(computation, number, microbatch == (0 if computation == "F" else last))

    @cache
    def message(source: int, target: int) -> tuple[float, Wires]:
        # Without a gradient nothing is sent back. Still the backward of a stage waits for the stage behind it.
        sent = rows * travelling[max(source, target)] * costs.precision.compute.itemsize
        sent *= target > source or stages[source].passes_gradient
        pair, wires = hop(plan, places[source], places[target], *nodes)
        return _travel_seconds(costs, pair, sent), wires

    order = _actions(plan.schedule, plan.pipeline_degree, plan.virtual_stages, microbatches)
    events, ends = replay(order, plan.num_stages, lambda *part: action(*part)[0], message)
    spent: list[dict[str, float]] = [defaultdict(float) for _ in range(plan.pipeline_degree)]
    for event in events:
        cost, parts = action(event.computation, event.stage, event.microbatch)
        # An action takes longer than alone while others use the same wires to other nodes.
        longer = (event.end - event.start) / cost.seconds if cost.seconds else 1.0
        for what, seconds in parts.items():
            spent[event.pp][what] += longer * seconds
    computed = {event.pp: event.end for event in events}
    done = [max(computed[pp], ends.get(pp, 0.0)) for pp in range(plan.pipeline_degree)]
    for pp, (parts, end) in enumerate(zip(spent, done, strict=True)):
        parts["gradients"] += end - computed[pp]
        parts["waiting"] += max(0.0, end - sum(parts.values()))
    return done, spent, events


def _travel_seconds(costs: LayerCosts, link: RankGroup, size: float) -> float:
    """Return the seconds to send `size` bytes to the next stage, without what `Hardware.pipeline` includes."""
    # The measured time of an empty pipeline action includes the latency of its message: do not count it twice.
    least = costs.links.seconds("p2p", link, 1) if costs.hardware.pipeline else 0.0
    return max(0.0, costs.links.seconds("p2p", link, size) - least)


@dataclass(frozen=True)
class Hops:
    """Seconds of one message between each two neighbouring stages of a pipeline."""

    each: tuple[float, ...] = ()
    """Seconds by the number of the earlier stage."""
    busiest: float = 0.0
    """Seconds that a micro-batch, forward and backward, occupies the wire with most messages."""


@cache
def _pipeline_hops(
    pipeline: Plan, stage_size: int, per_node: int, nics_per_node: int | None
) -> tuple[tuple[RankGroup, ...], tuple[tuple[int, ...], ...]]:
    """Return (pairs of neighbouring stages, by wire the numbers of the pairs whose messages use it)."""
    axes = (Axis("dp", stage_size),) if stage_size > 1 else ()
    plan, users = replace(pipeline, layers=(("*", Strategy(axes)),)), defaultdict[tuple[str, int], list[int]](list)
    places = [rank_of_stage(number, plan) for number in range(plan.num_stages)]
    hops = list[RankGroup]()
    for number, (a, b) in enumerate(pairwise(places)):
        (pair, there), (_, back) = (hop(plan, *ends, per_node, nics_per_node) for ends in ((a, b), (b, a)))
        hops.append(pair)
        for wire in (*there, *back):
            users[wire].append(number)
    return tuple(hops), tuple(dict.fromkeys(map(tuple, users.values())))


def hop_seconds(pipeline: Plan, costs: LayerCosts, stage_size: int, size: float) -> Hops:
    """Return the seconds of messages of `size` bytes in a pipeline whose axis is outermost.

    pipeline: plan without layers.
    stage_size: ranks of a stage.
    """
    hardware = costs.hardware
    groups, wires = _pipeline_hops(pipeline, stage_size, hardware.ranks_per_node, hardware.nics_per_node)
    each = {group: _travel_seconds(costs, group, size) for group in {*groups}}
    seconds = tuple(each[group] for group in groups)
    return Hops(seconds, max((sum(seconds[number] for number in wire) for wire in wires), default=0.0))


def norm_seconds(costs: LayerCosts, ranks: int) -> float:
    """Return the seconds in which `ranks` ranks sum the norm of the gradients: one number of 8 bytes."""
    return costs.links.seconds("all_reduce", all_ranks(ranks, costs.hardware.ranks_per_node), 8) if ranks > 1 else 0.0


def sharing_seconds(plan: Plan, costs: LayerCosts) -> float:
    """Return the seconds in which ranks add the gradients of shared parameters, and of tables over the world."""
    config, itemsize = costs.config, costs.precision.parameters.itemsize
    if not config.holders:
        return 0.0
    owners = [owner for owner in config.holders if owner not in costs.frozen]
    places, strategies = sharing_places(config, plan), plan.strategies(config.layer_names)
    per_node = costs.hardware.ranks_per_node
    tables = sum(math.prod(config.shape(owner)) for owner in owners if owner in config.tables) * itemsize
    seconds = costs.links.seconds("all_reduce", all_ranks(plan.world_size, per_node), tables)
    for owner in owners:
        if len(used := places.get(owner, ())) > 1:
            name = layer_of(owner)
            split = parameter_splits(config.layers[name], strategies[name].mode)[owner.removeprefix(f"{name}.")]
            sizes = dict(mesh_axes(strategies[name]))
            parts = math.prod(sizes.get(axis, 1) for axis in (*split.axes, *sharding_axes(strategies[name])))
            shard = math.prod(split.shape) / parts * itemsize
            seconds += costs.links.seconds("all_reduce", sharing_group(plan, used, per_node), shard)
    return seconds


def _finish(
    plan: Plan, stages: list[StageCost], done: list[float], spent: list[dict[str, float]], costs: LayerCosts
) -> tuple[float, int]:
    """Add what follows the last backward to the `Times` of a step.

    That is the sum of partial gradients over tensor axes, sums of parameters that layers share, the norm of the
    gradients, and the optimizer. Return the seconds of the step, and the index of the pp axis that waits least.
    """
    ends, optimizer = [], []
    for pp, end in enumerate(done):
        sums: defaultdict[RankGroup, int] = defaultdict(int)
        elements = {False: 0, True: 0}  # parameter elements, by whether they are offloaded
        for layer in (layer for number in stages_of_rank(pp, plan) for layer in stages[number].layers):
            elements[layer.weights.offloaded] += layer.weights.trained_elements
            # One message per group: all layers of the same groups share it.
            for axis, partial in layer.weights.sums.items():
                sums[layer.position.groups.along(axis)] += partial * costs.precision.parameters.itemsize
        added = sum(costs.links.seconds("all_reduce", group, size) for group, size in sums.items())
        spent[pp]["gradients"] += added
        ends.append(end + added)
        updates = (costs.update(number, offloaded) for offloaded, number in elements.items() if number)
        optimizer.append(sum(updates))
    busiest = max(range(len(ends)), key=lambda pp: ends[pp] - spent[pp]["waiting"])
    # All ranks meet at the norm: the slowest one decides when it begins, and when the optimizer has finished.
    norm, shared = norm_seconds(costs, plan.world_size), sharing_seconds(plan, costs)
    for parts, end, update in zip(spent, ends, optimizer, strict=True):
        parts["gradients"] += shared
        parts["optimizer"] = norm + update
        parts["waiting"] += max(ends) - end + max(optimizer) - update
    return max(ends) + shared + norm + max(optimizer), busiest


def _buffers(plan: Plan, costs: LayerCosts, batch: BatchArithmetic) -> list[float]:
    """Return the bytes that each stage keeps throughout: receive buffers and, for the first stage, the step's images.

    torch allocates receive buffers for every micro-batch: of activations from the previous stage, and of gradients from
    the next.
    """
    config, itemsize = costs.config, costs.precision.compute.itemsize
    stages = _laid_out(plan, config)[0]
    whole = batch.microbatches * batch.microbatch_rows * itemsize
    passing = [whole * elements for elements in _travelling(plan, config)]
    images = batch.global_batch * image_layout(stages[0][0][1])[0].share
    gradients = [config.kinds[stage[-1][0]].backward != "nothing" for stage in stages]
    buffers = [before + behind * back for (before, behind), back in zip(pairwise(passing), gradients, strict=True)]
    buffers[0] += images * config.input.bytes(itemsize)
    return buffers
