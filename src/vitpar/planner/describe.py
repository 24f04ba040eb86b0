"""Summary of a plan applied to a model. No devices, data or process group are needed.

Communication is listed by mesh axis and flag, as in the tables of ``vitpar.models.roles``, ``vitpar.parallel.data``
and ``vitpar.parallel.parallelize``. Counts are those of one block for one micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from vitpar.models.config import ModelConfig
from vitpar.models.derived import with_frozen
from vitpar.models.description import LayerDescription, Part, layer_of
from vitpar.models.roles import AXES, TABLE, UNSPLIT, Message, parameter_splits
from vitpar.planner.cost.elements import layer_elements
from vitpar.planner.cost.pipeline import idle_share
from vitpar.strategy import (
    Plan,
    Strategy,
    batch_arithmetic,
    place_of_rank,
    stage_layers,
    stages_of_rank,
    token_layout,
)
from vitpar.strategy.execution import LayerExecution, Rules
from vitpar.strategy.layout import mesh_axes, place, received_share, sharding_axes
from vitpar.strategy.plan_json import plan_to_json
from vitpar.strategy.stages import sharing_places, travel_layouts
from vitpar.strategy.traffic import layer_traffic
from vitpar.text import count, ranks

STAGES_GATHERED = 3
"""Maximum number of a rank's stages whose parameters torch's schedules keep gathered (`max_active_stages`)."""
Summary = dict[str, Any]
"""Part of the result of `summarize`."""


def summarize(
    config: ModelConfig,
    plan: Plan,
    batch_size: int,
    precision: str,
    bytes_per_parameter: float,
    frozen: Collection[str] = (),
    bytes_per_frozen: float = 0,
) -> dict[str, Any]:
    """Return what `vitpar plan --json` prints of `plan`, which fits the model and the batch.

    | key | content |
    |---|---|
    | pipeline | by place of the pp axis: its stages, their layers, parameters and bytes of state on the fullest rank |
    | pipeline_axis, axes | a mesh axis, its degree and the communication along it, in words |
    | travel | share of a micro-batch's complete activation that each rank sends on, by stage; not for the last |
    | strategies | by strategy: layers, axes and flags, and the place of every rank of a stage on these axes |
    | redistributions | changes of an activation's layout: the layer behind, the stage that performs it, and the |
    | | shares of the complete activation and of its gradient that the busiest rank receives |
    | shared | parameters that several layers share |
    | ranks | place of every rank of the world |

    `state_bytes` counts no activations, gathered copies of sharded parameters and unreduced gradients; `host_bytes` is
    its part in host memory (+offload). Shares are 0 to 1; `idle_share` is that of a step that a pipeline rank waits.

    bytes_per_parameter: bytes of state per trained parameter element of a rank, as `state_bytes` of
    ``vitpar.training.optim.state_memory`` counts them
    frozen: names of the parameters that are not trained
    bytes_per_frozen: bytes per element of these, as `frozen_bytes` counts them
    """
    batch, pp = batch_arithmetic(plan, batch_size), plan.pipeline_degree
    return {
        "model": config.name,
        "num_classes": config.num_classes,
        "strategy": str(plan),
        "world_size": plan.world_size,
        "precision": precision,
        "plan": plan_to_json(plan),
        "parameters": config.parameters,
        "batch": asdict(batch),
        "idle_share": idle_share(plan, batch.microbatches),
        "pipeline": _pipeline(with_frozen(config, frozenset(frozen)), plan, (bytes_per_parameter, bytes_per_frozen)),
        "pipeline_axis": {"axis": "pp", "degree": pp, "communication": _PIPELINE_WORDS} if pp > 1 else None,
        "travel": [layout[0].share for layout in travel_layouts(config, plan)],
        "strategies": _strategies(config, plan),
        "redistributions": _redistributions(config, plan),
        "shared": _shared(config, plan),
        "ranks": [
            dict(zip(("pp", "stage_rank"), place_of_rank(plan, rank), strict=True)) for rank in range(plan.world_size)
        ],
    }


def shown_axis(strategy: Strategy, axis: str) -> str:
    """Return the label of an axis of a layer's mesh: "tp" if tensor parallelism has a single axis."""
    return "tp" if strategy.tensor_mode == "1d" and axis == "j" else axis


def _pipeline(config: ModelConfig, plan: Plan, sizes: tuple[float, float]) -> list[Summary]:
    """Return the share of the model at each place of the pp axis.

    sizes: bytes of state per element of parameters that are trained and frozen.
    """
    parts, flops = stage_layers(config, plan), config.layer_flops
    strategies = plan.strategies(config.layer_names)
    held, trained = (
        {name: layer_elements(config.layers[name], strategies[name], trained=only).local_numel for name in strategies}
        for only in (False, True)
    )
    size = {name: trained[name] * sizes[0] + (held[name] - trained[name]) * sizes[1] for name in held}
    pipeline_ranks = []
    for pp in range(plan.pipeline_degree):
        stages = stages_of_rank(pp, plan)
        names = [name for stage in stages for name in parts[stage]]
        pipeline_ranks.append(
            {
                "pp": pp,
                "stages": list(stages),
                "layers": [list(parts[stage]) for stage in stages],
                "flops_share": sum(flops[name] for name in names) / sum(flops.values()),
                "parameters": sum(held[name] for name in names),
                "state_bytes": round(sum(size[name] for name in names)),
                "host_bytes": round(sum(size[name] for name in names if strategies[name].offload)),
            }
        )
    return pipeline_ranks


def _shared(config: ModelConfig, plan: Plan) -> list[Summary]:
    """Return the summaries of shared parameters."""
    stage_of = {name: stage for stage, names in enumerate(stage_layers(config, plan)) for name in names}
    places, summaries = sharing_places(config, plan), list[Summary]()
    for owner, (_, *copies) in config.holders.items():
        stages = {stage_of[layer_of(name)] for name in (owner, *copies)}
        if not copies:
            continue
        if owner in config.tables:
            words = "every rank has all of it; all ranks all-reduce its gradients, once a step"
        elif len(places[owner]) > 1:
            words = f"{ranks(stages, 'stage')} all-reduce the gradients of their copies, once a step"
        else:
            words = "each layer has a copy, with the sum of their gradients"
        summaries.append({"owner": owner, "copies": copies, "communication": words})
    return summaries


def _strategies(config: ModelConfig, plan: Plan) -> list[Summary]:
    """Return the summaries of the strategies that layers have, in the order of layers."""
    layers: dict[Strategy, list[str]] = {}
    for name, strategy in plan.strategies(config.layer_names).items():
        layers.setdefault(strategy, []).append(name)
    return [
        {
            "strategy": str(strategy),
            "layers": names,
            "axes": _axis_words(strategy, plan, [config.layers[name] for name in names]),
            "flags": [{"flag": flag, "effect": effect} for flag, effect in _flag_words(strategy)],
            "shards": bool(sharding_axes(strategy)),
            "places": [
                {shown_axis(strategy, axis): index for axis, index in place(strategy, rank).items()}
                for rank in range(strategy.size)
            ],
        }
        for strategy, names in layers.items()
    ]


def _redistributions(config: ModelConfig, plan: Plan) -> list[Summary]:
    """Return the changes of layout between layers."""
    # Between two stages the one whose layout does not travel redistributes, see `travel_layouts`.
    strategies, travel = plan.strategies(config.layer_names), travel_layouts(config, plan)
    stage_of = {name: stage for stage, names in enumerate(stage_layers(config, plan)) for name in names}
    redistributions = []
    for before, behind in pairwise(config.layer_names):
        source, target = token_layout(strategies[before]), token_layout(strategies[behind])
        if source == target:
            continue
        stage = stage_of[behind]
        if stage_of[before] < stage and travel[stage_of[before]] == target:
            stage = stage_of[before]
        redistributions.append(
            {
                "layer": behind,
                "stage": stage,
                "source": str(strategies[before]),
                "target": str(strategies[behind]),
                "forward": received_share(source, target),
                "backward": received_share(target, source),
            }
        )
    return redistributions


def _axis_words(strategy: Strategy, plan: Plan, layers: Sequence[LayerDescription]) -> list[Summary]:
    """Return the summaries of a strategy's axes, outermost first. layers: those that have it, in order."""
    # Blocks communicate most, and those of the most frequent kind stand for all.
    kinds = Counter(layer.kind for layer in layers if layer.is_block)
    kind = kinds.most_common(1)[0][0] if kinds else layers[-1].kind
    typical = next(layer for layer in layers if layer.kind == kind)
    summaries = []
    for axis, degree in mesh_axes(strategy):
        if axis in ("dp", "fsdp", "d", "i"):
            words = _data_words(axis, strategy, plan, typical)
        else:
            words = _tensor_words(axis, strategy, typical)
        summaries.append({"axis": shown_axis(strategy, axis), "degree": degree, "communication": words})
    return summaries


def _flag_words(strategy: Strategy) -> Iterator[tuple[str, str]]:
    """Yield the strategy's flags that no axis describes, each with its effect."""
    if strategy.sequence_parallel:
        yield "+sp", SEQUENCE_PARALLEL
    if strategy.checkpoint == "full":
        sent = ", including tp communication," if strategy.has("tp") else ""
        yield "+ckpt", f"layers keep only their input and recompute their forward{sent} in backward"
    elif strategy.checkpoint:
        kept = "outputs of matrix products, attention and tp communication"
        yield f"+ckpt.{strategy.checkpoint}", f"layers keep {kept}, and recompute the rest in backward"
    if strategy.offload:
        words = "parameters, gradients and optimizer state are in host memory; layers copy parameters in to compute"
        yield "+offload", words


def _data_words(axis: str, strategy: Strategy, plan: Plan, layer: LayerDescription) -> str:
    """Return the communication along an axis that splits the batch, whose ranks hold copies or shards of parameters."""
    sharding = sharding_axes(strategy)
    alike = [name for name, _ in mesh_axes(strategy) if name in ("dp", "fsdp", "d", "i")]
    alike = [name for name in alike if (name in sharding) == (axis in sharding)]
    if alike[0] != axis:
        return f"split the batch; communicate in one group with {alike[0]}"
    split = "split the batch; " if axis in ("d", "i") else ""
    if axis not in sharding:
        return f"{split}all-reduce {'the shards of ' if sharding else ''}gradients, once a step"
    # The precision does not affect when data is sent.
    execution = Rules.under(plan, "fp32").of(strategy, layer)
    gather, reduce = _gathers(execution, plan), "once a step"
    if execution.reduced == "every micro-batch":
        reduce = "for every micro-batch"
    if gather == reduce:
        return f"{split}all-gather parameters and reduce-scatter gradients, {reduce}"
    return f"{split}all-gather parameters {gather}; reduce-scatter gradients, {reduce}"


def _gathers(execution: LayerExecution, plan: Plan) -> str:
    """Return when sharded parameters are gathered, in words."""
    if execution.gathers_in_backward:
        return "layer by layer, in forward and in backward of every micro-batch"
    if plan.pp != 1 and plan.virtual_stages > STAGES_GATHERED:
        return f"of {STAGES_GATHERED} of a rank's stages at a time, in turns"
    return "once a step"


def _tensor_words(axis: str, strategy: Strategy, layer: LayerDescription) -> str:
    """Return the communication along an axis that splits products, of a layer in a micro-batch."""
    mode, sizes = strategy.mode, dict(strategy.tensor_shape)
    rows = strategy.data_parallel * math.prod(sizes.values())  # the smallest batch that all axes divide
    passes = []
    for name, traffic in zip(("forward", "backward"), layer_traffic(layer, strategy, rows), strict=True):
        sent = Counter[str]()
        for collective, times in traffic.items():
            if collective.axis == axis:
                sent[collective.operation.replace("_", "-")] += times
        if sent:
            passes.append(f"{name} {', '.join(count(times, operation) for operation, times in sorted(sent.items()))}")
    parts = parameter_splits(layer, mode).values()
    words = [f"split the {AXES[mode][axis]}"] if AXES[mode][axis] else []
    if passes:
        words.append(f"{', '.join(passes)}, for every layer and micro-batch")
    elif not words and not any(axis in part.axes for part in parts):
        words.append("compute the same on all ranks")
    if any(axis in part.sums for part in parts):
        words.append("all-reduce gradients of what is not split, once a step")
    return "; ".join(words if passes or len(words) > 1 else [*words, "send nothing"])


def layer_modules(config: ModelConfig, plan: Plan) -> list[Summary]:
    """Return the tensor-parallel plan of each kind of layer, module by module: what ``parallelize_module`` applies.

    A record has the names of layers of one kind under one strategy, and a row for each of their modules: its role
    (``vitpar.models.roles``) and style (``vitpar.parallel.tensor``), the placements of its weight and bias, and the
    collectives before and after its product, in forward / in backward; empty for what it does not have.
    """
    layers: dict[tuple[str, Strategy], list[str]] = {}
    for name, strategy in plan.strategies(config.layer_names).items():
        if strategy.degree("tp") > 1:
            layers.setdefault((config.layers[name].kind, strategy), []).append(name)
    return [
        {
            "layers": names,
            "strategy": str(strategy),
            "modules": [_module(part, strategy.mode) for part in config.layers[names[0]].parts],
        }
        for (_, strategy), names in layers.items()
    ]


def _module(part: Part, mode: str) -> Summary:
    role = TABLE[mode].get(part.role, UNSPLIT)
    return {
        "module": part.name,
        "role": part.role,
        "style": role.style,
        "weight": _placement(role.weight, mode) if {"weight", ""} & part.shapes.keys() else "",
        "bias": _placement(role.bias, mode) if "bias" in part.shapes else "",
        "before": _exchange(role.before, mode),
        "after": ", then ".join(filter(None, (_exchange(role.gathered, mode), _exchange(role.after, mode)))),
    }


def _placement(dims: Mapping[str, int], mode: str) -> str:
    """Return torch's placement on each axis of a mode. Several axes have their names."""
    placed = {axis: f"Shard({dims[axis]})" if axis in dims else "Replicate" for axis in AXES[mode]}
    return ", ".join(words if len(placed) == 1 else f"{axis} {words}" for axis, words in placed.items())


def _exchange(message: Message | None, mode: str) -> str:
    if message is None:
        return ""
    return message.exchange.words + (f" over {message.axis}" if len(AXES[mode]) > 1 else "")


SEQUENCE_PARALLEL = (
    "split the samples of a micro-batch where Megatron splits the sequence: the same messages and memory, for any "
    "number of tokens"
)
"""Words on what +sp means here."""
_PIPELINE_WORDS = "send activations to the next stage and their gradients back, for every micro-batch"
