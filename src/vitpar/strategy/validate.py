"""Checks that a plan fits a model and a batch, before any worker starts. Every error names the numbers and a fix."""

from __future__ import annotations

import math
from dataclasses import replace

from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription, layer_of
from vitpar.models.roles import chunk_range, parameter_splits
from vitpar.strategy.batch import batch_arithmetic
from vitpar.strategy.layer import Strategy
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.strategy.selectors import numbered
from vitpar.strategy.stages import split_blocks
from vitpar.text import closest, count, divisors, either, shown


def validate(plan: Plan, model: ModelConfig, batch_size: int | None) -> Plan:
    """Return the plan with its number of micro-batches filled in and its blocks numbered, ready to run.

    A microbatch_size is converted to microbatches, so validating the result again changes nothing.

    batch_size: global images per step; with None, checks and micro-batches that depend on it are left out

    Raises StrategyError if the plan has an open degree, or does not fit the model, the batch or its schedule.
    """
    _ = plan.world_size  # refuses an open degree
    plan = replace(plan, layers=numbered(plan.layers, model.groups, model.name))
    _check_layers(plan, model)
    _check_shared(plan, model)
    _check_schedule(plan)
    _check_stages(plan, model)
    if batch_size is not None:
        microbatches = batch_arithmetic(plan, batch_size).microbatches
        return replace(plan, microbatches=microbatches, microbatch_size=None)
    if plan.pp == 1 and plan.microbatch_size is None:
        return replace(plan, microbatches=plan.microbatches or 1)
    return plan


def _check_layers(plan: Plan, model: ModelConfig) -> None:
    """Raise StrategyError if a layer's strategy cannot split it, or the plan names layers that the model lacks."""
    checked = set()
    # Blocks first: they have more numbers to divide, so that the message finds a degree that fits everywhere.
    strategies = plan.strategies(tuple(model.layers))
    for name, strategy in sorted(strategies.items(), key=lambda item: not model.layers[item[0]].is_block):
        layer = model.layers[name]
        if (layer.kind, strategy) not in checked:
            checked.add((layer.kind, strategy))
            owner = model.name if layer.group is None else f"{layer.group} of {model.name}"
            if fault := unsplittable(layer, strategy, owner):
                raise StrategyError(fault)


def _check_shared(plan: Plan, model: ModelConfig) -> None:
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


def unsplittable(layer: LayerDescription, strategy: Strategy, owner: str = "") -> str | None:
    """Return what is wrong and what to do if `strategy` cannot split a layer over its ranks of tp; None if it can.

    owner: whose numbers the layer has, for the message: the model, or a group of its blocks.
    """
    tp, side, mode = strategy.degree("tp"), dict(strategy.tensor_shape)["j"], strategy.mode
    if tp > 1 and mode not in layer.modes:
        fix = f"leave {strategy.tensor_flag} out" if "1d" in layer.modes and mode != "1d" else "use dp or fsdp for them"
        why = ", whose parts only tp and +sp can split" if layer.modes == ("1d", "sp") else ""
        return f"tp{tp}{strategy.tensor_flag} cannot split the layers '{layer.kind}' of {owner}{why}: {fix}"
    for rows in (part.shapes["weight"][0] for part in layer.parts if part.role.startswith("vocabulary_")):
        if tp > 1 and not chunk_range(rows, side, side - 1):
            return f"tp{tp} leaves a rank without any of the {count(rows, 'token id')} of {owner}: use a smaller degree"
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
            return f"tp{tp} does not divide the {count(number, noun)} of {owner}: {fix}"
        sides = [str(n) for n in closest(divisors(divides)[1:], side, most=4)]
        fix = f"use sides of {either(sides)}" if sides else "use dp or fsdp instead"
        what = f"the side {side} of tp{tp}{strategy.tensor_flag}"
        return f"{what} does not divide the {count(number, noun)} of {owner}: {fix}"
    return None


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


def _check_stages(plan: Plan, model: ModelConfig) -> None:
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
