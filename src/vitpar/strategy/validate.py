"""Checks that a plan fits a model and a batch, before any worker starts. Every error names the numbers and a fix."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Protocol

from vitpar.errors import StrategyError
from vitpar.models.description import LayerDescription, block_name, layer_of
from vitpar.models.roles import chunk_range, parameter_splits
from vitpar.strategy.batch import batch_arithmetic, refuse_both_ways, schedule_objection
from vitpar.strategy.layer import Axis, Role, Strategy
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.strategy.stages import split_blocks
from vitpar.text import closest, count, divisors, either, shown


class Model(Protocol):
    """Part of a model's configuration that plans depend on (``vitpar.models.config.ModelConfig``)."""

    @property
    def name(self) -> str: ...
    @property
    def layers(self) -> Mapping[str, LayerDescription]:
        """Layers by name in order: embed, blocks.0 …, head."""

    @property
    def groups(self) -> Mapping[str, range]:
        """Blocks of each group that has a name."""

    @property
    def holders(self) -> Mapping[str, tuple[str, ...]]:
        """Names of each shared parameter in the layers, by the owner's name."""

    @property
    def tables(self) -> Collection[str]:
        """Names of tables, which layers of any strategies may share."""


def validate(plan: Plan, model: Model, batch_size: int | None) -> Plan:
    """Return the plan with its number of micro-batches filled in and its blocks numbered, ready to run.

    A microbatch_size is converted to microbatches, so validating the result again changes nothing.

    batch_size: global images per step; with None, checks and micro-batches that depend on it are left out

    Raises StrategyError if the plan has an open degree, or does not fit the model, the batch or its schedule.
    """
    _ = plan.world_size  # refuses an open degree
    plan = plan.numbered(model.groups, model.name)
    _check_layers(plan, model, batch_size)
    _check_shared(plan, model)
    _check_schedule(plan)
    _check_stages(plan, model)
    if batch_size is not None:
        microbatches = batch_arithmetic(plan, batch_size).microbatches
        return replace(plan, microbatches=microbatches, microbatch_size=None)
    _check_microbatches(plan)
    if plan.pp == 1 and plan.microbatch_size is None:
        return replace(plan, microbatches=plan.microbatches or 1)
    return plan


def _check_layers(plan: Plan, model: Model, batch_size: int | None) -> None:
    """Raise StrategyError if a layer's strategy cannot split it, or the plan names layers that the model lacks."""
    checked = set()
    # Blocks first: they have more numbers to divide, so that the message finds a degree that fits everywhere.
    strategies = plan.strategies(tuple(model.layers))
    for name, strategy in sorted(strategies.items(), key=lambda item: not model.layers[item[0]].is_block):
        layer = model.layers[name]
        if (layer.kind, strategy) not in checked:
            checked.add((layer.kind, strategy))
            if fault := unsplittable(layer, strategy, _owner(layer, model)):
                raise StrategyError(f"{fault[0]}: {_layerwise(plan, model, batch_size) or fault[1]}")


def _check_shared(plan: Plan, model: Model) -> None:
    """Raise StrategyError if layers that share a parameter have other strategies, or split it in other ways."""
    strategies = plan.strategies(tuple(model.layers))
    for owner, (_, *copies) in model.holders.items():
        if owner in model.tables:
            continue
        first, name = layer_of(owner), owner.removeprefix(f"{layer_of(owner)}.")
        for copy in copies:
            other = layer_of(copy)
            if strategies[first] != strategies[other]:
                raise StrategyError(
                    f"{first} and {other} share {owner}, but their strategies are {strategies[first]} and "
                    f"{strategies[other]}: give them the same one"
                )
            mode = strategies[first].mode
            mine = parameter_splits(model.layers[first], mode)[name]
            theirs = parameter_splits(model.layers[other], mode)[copy.removeprefix(f"{other}.")]
            if strategies[first].has("tp") and mine.axes != theirs.axes:
                raise StrategyError(
                    f"{first} and {other} share {owner}, but {strategies[first]} splits it in different ways: "
                    "give both layers the same role for it, or use dp or fsdp"
                )


def _owner(layer: LayerDescription, model: Model) -> str:
    """Return the name of what a layer's numbers belong to, for messages: the model, or a group of its blocks."""
    return model.name if layer.group is None else f"{layer.group} of {model.name}"


def unsplittable(layer: LayerDescription, strategy: Strategy, owner: str = "") -> tuple[str, str] | None:
    """Return (what is wrong, what to do) if `strategy` cannot split a layer over its ranks of tp; None if it can.

    owner: whose numbers the layer has, for the message.
    """
    tp, side, mode = strategy.degree("tp"), dict(strategy.tensor_shape)["j"], strategy.mode
    if tp > 1 and mode not in layer.modes:
        fix = f"leave {strategy.tensor_flag} out" if "1d" in layer.modes and mode != "1d" else "use dp or fsdp for them"
        why = ", whose parts only tp and +sp can split" if layer.modes == ("1d", "sp") else ""
        return f"tp{tp}{strategy.tensor_flag} cannot split the layers '{layer.kind}' of {owner}{why}", fix
    for rows in (part.shapes["weight"][0] for part in layer.parts if part.role.startswith("vocabulary_")):
        if tp > 1 and not chunk_range(rows, side, side - 1):
            return (
                f"tp{tp} leaves a rank without any of the {count(rows, 'token id')} of {owner}",
                "use a smaller degree",
            )
    split = dict(layer.divisible)
    if strategy.tensor_mode != "1d":
        shapes = [layer.takes, None if layer.last else layer.gives]
        split["feature"] = math.gcd(*(shape.features for shape in shapes if shape))
    divides = math.gcd(*split.values())
    for noun, number in split.items():
        if number % side == 0:
            continue
        if strategy.tensor_mode == "1d":
            working = [f"tp{n}" for n in closest(divisors(divides)[1:], tp, most=4)]
            fix = f"use {either(working)}" if working else "leave tp out"
            return f"tp{tp} does not divide the {count(number, noun)} of {owner}", fix
        sides = [str(n) for n in closest(divisors(divides)[1:], side, most=4)]
        fix = f"use sides of {either(sides)}" if sides else "use dp or fsdp instead"
        return (
            f"the side {side} of tp{tp}{strategy.tensor_flag} does not divide the {count(number, noun)} of {owner}",
            fix,
        )
    return None


def _layerwise(plan: Plan, model: Model, batch_size: int | None) -> str | None:
    """Return the suggestion of a layerwise plan in place of a uniform one that only some groups of blocks allow.

    There the ranks of tp become ranks of dp. None if there is no such plan, or it fits neither the model nor the batch.
    """
    if not plan.is_uniform or not model.groups:
        return None
    strategy, layers = plan.strategy, model.layers
    able = {
        name: all(not unsplittable(layers[block_name(index)], strategy) for index in blocks)
        for name, blocks in model.groups.items()
    }
    if not any(able.values()):
        return None
    unable = [name for name, fits in able.items() if not fits]
    outside = [name for name, layer in layers.items() if not layer.is_block and unsplittable(layer, strategy)]
    try:
        other = _without_tp(strategy)
        groups = (*((name, other) for name in (*outside, *unable)), ("*", strategy))
        suggested = replace(plan, layers=groups, pp_index=0)
        validate(suggested, model, batch_size)
    except StrategyError:
        return None
    return f"give them another strategy, as in '{suggested}'"


def _without_tp(strategy: Strategy) -> Strategy:
    """Return `strategy` with its ranks of tp as ranks of dp, or of fsdp where it has fsdp and no dp."""
    role: Role = "fsdp" if strategy.has("fsdp") and not strategy.has("dp") else "dp"
    degree = strategy.degree("tp") * strategy.degree(role)
    axes = tuple(Axis(role, degree) if axis.role == role else axis for axis in strategy.axes if axis.role != "tp")
    axes = axes if strategy.has(role) else (*axes, Axis(role, degree))
    return replace(strategy, axes=axes, tensor_mode="1d", depth=None, sequence_parallel=False)


def _check_schedule(plan: Plan) -> None:
    """Raise StrategyError if the schedule does not fit pp and the virtual stages."""
    schedule = SCHEDULES[plan.schedule]
    if plan.schedule != Plan().schedule and plan.pp == 1:
        raise StrategyError(
            f"schedule {plan.schedule} needs pp, which '{shown(plan)}' lacks: add an axis such as pp2, or use "
            "schedule 1f1b"
        )
    if schedule.stages == "several" and plan.virtual_stages == 1:
        raise StrategyError(
            f"schedule {plan.schedule} needs 2 or more virtual stages, not 1: "
            "set virtual_stages to 2, or use schedule 1f1b"
        )
    if schedule.stages == "two" and plan.virtual_stages != 2:
        raise StrategyError(
            f"schedule {plan.schedule} needs 2 virtual stages, not {plan.virtual_stages}: set virtual_stages to 2"
        )
    if schedule.stages == "one" and plan.virtual_stages > 1:
        raise StrategyError(
            f"schedule {plan.schedule} has 1 stage per rank, not {plan.virtual_stages}: "
            "set virtual_stages to 1, or use schedule interleaved1f1b"
        )


def _check_stages(plan: Plan, model: Model) -> None:
    """Raise StrategyError if the model has too few blocks for the stages, or the split does not fit."""
    pp, virtual, stages = plan.pipeline_degree, plan.virtual_stages, plan.num_stages
    num_blocks = len(model.layers) - 2
    if stages > num_blocks:
        made = f"pp{pp}" if virtual == 1 else f"pp{pp} with {count(virtual, 'virtual stage')}"
        smaller = f"pp{num_blocks // virtual}" + (f" with {virtual}" if virtual > 1 else "")
        example = f", as in {smaller}" if num_blocks // virtual > 1 else ""
        raise StrategyError(
            f"{made} makes {stages} stages but {model.name} has {count(num_blocks, 'block')}: "
            f"use at most {count(num_blocks, 'stage')}{example}"
        )
    if not isinstance(plan.split, str):
        split_blocks(num_blocks, stages, plan.split)


def _check_microbatches(plan: Plan) -> None:
    """Raise StrategyError if the number of micro-batches is wrong for any batch size."""
    refuse_both_ways(plan)
    if plan.microbatches is None:
        return
    if objection := schedule_objection(plan, plan.microbatches):
        nearby = range(max(1, plan.microbatches - 2 * plan.num_stages), plan.microbatches + plan.num_stages + 1)
        working = [n for n in nearby if not schedule_objection(plan, n)]
        raise StrategyError(f"{objection}: use {either(closest(working, plan.microbatches))}")
