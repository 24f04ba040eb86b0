"""Summary of a plan applied to a model, by arithmetic alone: no devices, data or process group are needed.

Communication is listed by mesh axis and flag, as in the tables of ``vitpar.parallel.tensor``, ``vitpar.parallel.data``
and ``vitpar.parallel.checkpointing``; counts are those of one block for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise

from vitpar.models.config import ViTConfig
from vitpar.parallel.pipeline import stage_layers, travel_layouts
from vitpar.planner.cost.elements import layer_parameters
from vitpar.planner.cost.pipeline import idle_share
from vitpar.strategy import BatchArithmetic, Plan, Strategy, batch_arithmetic, stages_of_rank, token_layout
from vitpar.strategy.execution import LayerExecution, Rules
from vitpar.strategy.layout import mesh_axes, received_share, sharding_axes

STAGES_GATHERED = 3
"""Stages of a rank that torch's schedules keep gathered at a time, at most (`max_active_stages`)."""


@dataclass(frozen=True)
class AxisSummary:
    """One axis of a mesh, and the communication along it in words.

    axis: pp, dp, fsdp, tp, or one of the axes that 2d, 2.5d and 3d arrange tp into: d, i, j, k.
    """

    axis: str
    degree: int
    communication: str


@dataclass(frozen=True)
class FlagSummary:
    """A flag that changes nothing about axes, and its effect in words."""

    flag: str
    effect: str


@dataclass(frozen=True)
class PipelineRank:
    """Share of the model held by the ranks at one place of the pp axis.

    Not counted: activations, gathered copies of sharded parameters, and gradients that wait for their reduce-scatter.
    """

    pp: int
    stages: tuple[int, ...]
    """Numbers of the stages; several under some schedules."""
    layers: tuple[tuple[str, ...], ...]
    """Names of the layers of each of these stages."""
    flops_share: float
    """Share of the model's FLOPs computed here, 0 to 1."""
    parameters: int
    """Parameter elements on the fullest rank here."""
    state_bytes: int
    """Bytes of parameters, gradients and optimizer state on the fullest rank."""
    host_bytes: int
    """Bytes of `state_bytes` in host memory (+offload)."""


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

    bytes_per_parameter: what a rank keeps for every element of its parameters, as `state_bytes` of
    ``vitpar.training.optim.optimizer`` counts them.
    """
    batch = batch_arithmetic(plan, batch_size)
    return PlanSummary(
        parameters=sum(layer_parameters(config, Plan()).values()),
        batch=batch,
        idle_share=idle_share(plan, batch.microbatches),
        pipeline=_pipeline(config, plan, bytes_per_parameter),
        pipeline_axis=AxisSummary("pp", plan.pipeline_degree, _PIPELINE_WORDS) if plan.pipeline_degree > 1 else None,
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
            axes=_axis_words(strategy, plan, names),
            flags=_flag_words(strategy),
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


def _axis_words(strategy: Strategy, plan: Plan, layers: Collection[str]) -> tuple[AxisSummary, ...]:
    """The axes of the layers that have `strategy`, outermost first. layers: their names."""
    found = []
    for axis, degree in mesh_axes(strategy):
        if axis in ("dp", "fsdp", "d", "i"):
            words = _data_words(axis, strategy, plan)
        else:
            words = _tensor_words(axis, strategy, layers)
        found.append(AxisSummary("tp" if strategy.tensor_mode == "1d" and axis == "j" else axis, degree, words))
    return tuple(found)


def _flag_words(strategy: Strategy) -> tuple[FlagSummary, ...]:
    """The flags of `strategy` that no axis tells of."""
    found = []
    if strategy.checkpoint == "full":
        sent = ", including tp communication," if strategy.has("tp") else ""
        words = f"layers keep only their input and recompute their forward{sent} in backward"
        found.append(FlagSummary("+ckpt", words))
    elif strategy.checkpoint:
        words = (
            "layers keep outputs of matrix products, attention and tp communication, and recompute the rest in backward"
        )
        found.append(FlagSummary(f"+ckpt.{strategy.checkpoint}", words))
    if strategy.offload:
        words = "parameters, gradients and optimizer state are in host memory; layers copy parameters in to compute"
        found.append(FlagSummary("+offload", words))
    return tuple(found)


def _data_words(axis: str, strategy: Strategy, plan: Plan) -> str:
    """An axis that splits the batch: its ranks hold copies of parameters, or parts that they gather."""
    sharding = sharding_axes(strategy)
    alike = [name for name, _ in mesh_axes(strategy) if name in ("dp", "fsdp", "d", "i")]
    alike = [name for name in alike if (name in sharding) == (axis in sharding)]
    if alike[0] != axis:
        return f"split the batch; communicate in one group with {alike[0]}"
    split = "split the batch; " if axis in ("d", "i") else ""
    if axis not in sharding:
        return f"{split}all-reduce {'the shards of ' if sharding else ''}gradients, once a step"
    execution = Rules.under(plan, "fp32").of(strategy, "blocks.0")  # when data is sent is the same in 16 bits
    gather, reduce = _gathers(execution, plan), "once a step"
    if execution.reduced == "every micro-batch":
        reduce = "for every micro-batch"
    if gather == reduce:
        return f"{split}all-gather parameters and reduce-scatter gradients, {reduce}"
    return f"{split}all-gather parameters {gather}; reduce-scatter gradients, {reduce}"


def _gathers(execution: LayerExecution, plan: Plan) -> str:
    """When sharded parameters are gathered."""
    if execution.gathers_in_backward:
        return "layer by layer, in forward and in backward of every micro-batch"
    if plan.pp != 1 and plan.virtual_stages > STAGES_GATHERED:
        return f"of {STAGES_GATHERED} of a rank's stages at a time, in turns"
    return "once a step"


def _tensor_words(axis: str, strategy: Strategy, layers: Collection[str]) -> str:
    """An axis that splits arithmetic. Embed and head do little of it; their words are for layers without a block."""
    mode = "sp" if strategy.sequence_parallel else strategy.tensor_mode
    words = _TENSOR_WORDS[mode, axis]
    for part in ("blocks.", "head", "embed"):
        if any(layer.startswith(part) for layer in layers):
            return words[part]
    raise AssertionError("a strategy has layers")


_PIPELINE_WORDS = "send activations to the next stage and their gradients back, for every micro-batch"
_SUMS = "; all-reduce gradients of what is not split, once a step"
_PARTS = "gather parts of the batch (2 a block in forward, 4 in backward) and reduce-scatter sums (2 and 2)"
_EVERY = ", for every micro-batch"
_STATISTICS = "all-reduce the norm's statistics and the classifier's sums" + _EVERY
_FEATURES = {
    "blocks.": "gather features before every matrix product (4 a block in forward, 4 in backward) and reduce-scatter "
    "their gradients (4 in backward), all-reduce the norms' statistics" + _EVERY,
    "head": _STATISTICS,
    "embed": "split features; send nothing",
}
_TENSOR_WORDS = {
    ("1d", "j"): {
        "blocks.": "all-reduce activations, twice a block in forward and twice in backward" + _EVERY,
        "head": "all-reduce the classifier's sums" + _EVERY,
        "embed": "compute the same on all ranks; send nothing",
    },
    ("sp", "j"): {
        "blocks.": "split the batch; " + _PARTS + _EVERY + _SUMS,
        "head": "gather the pooled batch and all-reduce the classifier's sums" + _EVERY + _SUMS,
        "embed": "split the batch" + _SUMS,
    },
    ("2d", "j"): _FEATURES,
    ("2.5d", "j"): _FEATURES,
    ("3d", "j"): {
        "blocks.": "split the batch; " + _PARTS + _EVERY + _SUMS,
        "head": "split the batch" + _SUMS,
        "embed": "split the batch" + _SUMS,
    },
    ("3d", "k"): {
        "blocks.": "split features; " + _PARTS + ", all-reduce the norms' statistics" + _EVERY + _SUMS,
        "head": _STATISTICS,
        "embed": "split features; send nothing",
    },
}
"""By mode, axis, and the first of these that the layers hold: a block, the head, embed."""
