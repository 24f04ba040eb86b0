"""What a plan makes of a model, by arithmetic alone: needs no devices, no data and no process group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from vitpar.models.config import ViTConfig
from vitpar.parallel.pipeline import stage_layers, travel_layouts
from vitpar.planner.cost.bubble import idle_share
from vitpar.planner.cost.held import layer_parameters
from vitpar.planner.describe.communication import AxisSummary, FlagSummary, axis_words, flag_words, pipeline_words
from vitpar.strategy import BatchArithmetic, Plan, Strategy, batch_arithmetic, stages_of_rank, token_layout
from vitpar.strategy.layout import received_share, sharding_axes


@dataclass(frozen=True)
class PipelineRank:
    """What the ranks at one place of the pp axis hold.

    stages: their numbers, several under some schedules. layers: the names of each of these stages' layers.
    flops_share: the part of the model's FLOPs computed here, 0 to 1. parameters: elements on the fullest rank here.
    state_bytes: what it keeps for them (parameters, gradients, optimizer state). host_bytes: how much of that is in
    host memory (+offload). Not counted: activations, gathered copies of sharded parameters, and whole gradients that
    wait to be reduced to the shard.
    """

    pp: int
    stages: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    flops_share: float
    parameters: int
    state_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class StrategySummary:
    """One strategy of a plan: the names of the layers that have it, its axes, outermost first, and its flags.

    shards: whether ranks keep parts of parameters that they gather to compute.
    """

    strategy: str
    layers: tuple[str, ...]
    axes: tuple[AxisSummary, ...]
    flags: tuple[FlagSummary, ...]
    shards: bool


@dataclass(frozen=True)
class Redistribution:
    """Where an activation changes its layout, in front of `layer` on the ranks of `stage`.

    source, target: the strategies of the layers around. forward, backward: how much of a whole micro-batch's activation
    (and of its gradient, the other way) the rank that receives most has to receive, 0 to 1.
    """

    layer: str
    stage: int
    source: str
    target: str
    forward: float
    backward: float


@dataclass(frozen=True)
class PlanSummary:
    """A plan applied to a model.

    parameters: elements of the whole model. idle_share: see `idle_share`. travel: for each stage but the last, how much
    of a whole micro-batch's activation each of its ranks sends on, 0 to 1. pipeline_axis: None without pp.
    """

    parameters: int
    batch: BatchArithmetic
    idle_share: float
    pipeline: tuple[PipelineRank, ...]
    pipeline_axis: AxisSummary | None
    travel: tuple[float, ...]
    strategies: tuple[StrategySummary, ...]
    redistributions: tuple[Redistribution, ...]


def summarize(config: ViTConfig, plan: Plan, batch_size: int, bytes_per_parameter: int) -> PlanSummary:
    """The summary of `plan`, which fits `config` and `batch_size` (``vitpar.strategy.validate``).

    bytes_per_parameter: what a rank keeps for every element of its parameters (``vitpar.training.state``).
    """
    batch = batch_arithmetic(plan, batch_size)
    return PlanSummary(
        parameters=sum(layer_parameters(config, Plan()).values()),
        batch=batch,
        idle_share=idle_share(plan, batch.microbatches),
        pipeline=_pipeline(config, plan, bytes_per_parameter),
        pipeline_axis=pipeline_words(plan) if plan.pipeline_degree > 1 else None,
        travel=tuple(layout[0].share for layout in travel_layouts(config, plan)),
        strategies=_strategies(config, plan),
        redistributions=_redistributions(config, plan),
    )


def _pipeline(config: ViTConfig, plan: Plan, bytes_per_parameter: int) -> tuple[PipelineRank, ...]:
    parts, flops = stage_layers(config, plan), config.layer_flops
    held, strategies = layer_parameters(config, plan), plan.strategies(config.layer_names)
    found = []
    for pp in range(plan.pipeline_degree):
        stages = stages_of_rank(pp, plan)
        names = [name for stage in stages for name in parts[stage]]
        parameters = sum(held[name] for name in names)
        found.append(
            PipelineRank(
                pp=pp,
                stages=stages,
                layers=tuple(parts[stage] for stage in stages),
                flops_share=sum(flops[name] for name in names) / config.flops,
                parameters=parameters,
                state_bytes=parameters * bytes_per_parameter,
                host_bytes=sum(held[name] for name in names if strategies[name].offload) * bytes_per_parameter,
            )
        )
    return tuple(found)


def _strategies(config: ViTConfig, plan: Plan) -> tuple[StrategySummary, ...]:
    """The strategies that layers have, in the order of the layers."""
    layers: dict[Strategy, list[str]] = {}
    for name, strategy in plan.strategies(config.layer_names).items():
        layers.setdefault(strategy, []).append(name)
    return tuple(
        StrategySummary(
            strategy=str(strategy),
            layers=tuple(names),
            axes=axis_words(strategy, plan, names),
            flags=flag_words(strategy),
            shards=bool(sharding_axes(strategy)),
        )
        for strategy, names in layers.items()
    )


def _redistributions(config: ViTConfig, plan: Plan) -> tuple[Redistribution, ...]:
    """Between two stages it is on the side whose layout does not travel, see `travel_layouts`."""
    strategies, travel = plan.strategies(config.layer_names), travel_layouts(config, plan)
    stage_of = {name: stage for stage, names in enumerate(stage_layers(config, plan)) for name in names}
    found = []
    for before, behind in pairwise(config.layer_names):
        source, target = token_layout(strategies[before]), token_layout(strategies[behind])
        if source == target:
            continue
        stage = stage_of[behind]
        if stage_of[before] < stage and travel[stage_of[before]] == target:
            stage = stage_of[before]
        found.append(
            Redistribution(
                layer=behind,
                stage=stage,
                source=str(strategies[before]),
                target=str(strategies[behind]),
                forward=received_share(source, target),
                backward=received_share(target, source),
            )
        )
    return tuple(found)
