"""Checks that a plan fits a model and a batch, before any worker starts. Every error names the numbers and a fix."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Protocol

from vitpar.errors import StrategyError
from vitpar.strategy.batch import batch_arithmetic, refuse_both_ways, schedule_objection
from vitpar.strategy.layer import Strategy
from vitpar.strategy.plan import Plan
from vitpar.strategy.schedules import SCHEDULES
from vitpar.strategy.stages import split_blocks
from vitpar.text import closest, count, divisors, either, shown


class ModelShape(Protocol):
    """Sizes of a model that plans and their communication depend on."""

    @property
    def name(self) -> str: ...
    @property
    def depth(self) -> int:
        """Number of blocks."""

    @property
    def embed_dim(self) -> int:
        """Number of features of a token."""

    @property
    def num_heads(self) -> int:
        """Number of attention heads of a block."""

    @property
    def mlp_hidden_dim(self) -> int:
        """Number of hidden features of a block's MLP."""

    @property
    def features(self) -> int:
        """Number of features that the classifier reads."""

    @property
    def representation_size(self) -> int | None:
        """Number of features of the hidden layer before the classifier; None without that layer."""

    @property
    def tokens(self) -> int:
        """Number of tokens of an image, including class, distillation and register tokens."""

    @property
    def num_classes(self) -> int: ...
    @property
    def pool(self) -> str:
        """Pooling of tokens, "cls" or "avg"."""

    @property
    def distillation(self) -> bool:
        """Whether the model has a distillation token with a second classifier."""

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers in order: embed, blocks.0 …, head."""


def validate(plan: Plan, model: ModelShape, batch_size: int | None) -> Plan:
    """Return the plan with its number of micro-batches filled in, ready to run.

    A microbatch_size is converted to microbatches, so validating the result again changes nothing.

    batch_size: global images per step; with None, checks and micro-batches that depend on it are left out

    Raises StrategyError if the plan has an open degree, or does not fit the model, the batch or its schedule.
    """
    _ = plan.world_size  # refuses an open degree
    plan.strategies(model.layer_names)  # refuses layers that the model lacks
    for strategy in plan.kinds:
        _check_tensor_parallel(strategy, model)
    _check_schedule(plan)
    _check_stages(plan, model)
    if batch_size is not None:
        microbatches = batch_arithmetic(plan, batch_size).microbatches
        return replace(plan, microbatches=microbatches, microbatch_size=None)
    _check_microbatches(plan)
    if plan.pp == 1 and plan.microbatch_size is None:
        return replace(plan, microbatches=plan.microbatches or 1)
    return plan


def _check_tensor_parallel(strategy: Strategy, model: ModelShape) -> None:
    """Raise StrategyError if the degree of tp, or the side of its square or cube, does not divide what it splits."""
    tp, side = strategy.degree("tp"), dict(strategy.tensor_shape)["j"]
    split = {"head": model.num_heads, "hidden feature": model.mlp_hidden_dim, "classifier feature": model.features}
    if strategy.tensor_mode != "1d":
        split["feature"] = model.embed_dim
    divides = math.gcd(*split.values())
    for noun, number in split.items():
        if number % side == 0:
            continue
        if strategy.tensor_mode == "1d":
            working = [f"tp{n}" for n in closest(divisors(divides)[1:], tp, most=4)]
            fix = f"use {either(working)}" if working else "leave tp out"
            raise StrategyError(f"tp{tp} does not divide the {count(number, noun)} of {model.name}: {fix}")
        sides = [str(n) for n in closest(divisors(divides)[1:], side, most=4)]
        fix = f"use sides of {either(sides)}" if sides else "use dp or fsdp instead"
        raise StrategyError(
            f"the side {side} of tp{tp}{strategy.tensor_flag} does not divide the {count(number, noun)} of "
            f"{model.name}: {fix}"
        )


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


def _check_stages(plan: Plan, model: ModelShape) -> None:
    """Raise StrategyError if the model has too few blocks for the stages, or the split does not fit."""
    pp, virtual, stages = plan.pipeline_degree, plan.virtual_stages, plan.num_stages
    if stages > model.depth:
        made = f"pp{pp}" if virtual == 1 else f"pp{pp} with {count(virtual, 'virtual stage')}"
        smaller = f"pp{model.depth // virtual}" + (f" with {virtual}" if virtual > 1 else "")
        example = f", as in {smaller}" if model.depth // virtual > 1 else ""
        raise StrategyError(
            f"{made} makes {stages} stages but {model.name} has {count(model.depth, 'block')}: "
            f"use at most {count(model.depth, 'stage')}{example}"
        )
    if not isinstance(plan.split, str):
        split_blocks(model.depth, stages, plan.split)


def _check_microbatches(plan: Plan) -> None:
    """Raise StrategyError if the number of micro-batches is wrong for any batch size."""
    refuse_both_ways(plan)
    if plan.microbatches is None:
        return
    if objection := schedule_objection(plan, plan.microbatches):
        nearby = range(max(1, plan.microbatches - 2 * plan.num_stages), plan.microbatches + plan.num_stages + 1)
        working = [n for n in nearby if not schedule_objection(plan, n)]
        raise StrategyError(f"{objection}: use {either(closest(working, plan.microbatches))}")
