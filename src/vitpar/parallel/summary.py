"""What a plan makes of a model, by arithmetic alone: needs no devices, no data and no process group.

The numbers come from the same tables that the runtime reads: `stage_layers`, the layer classes' `TENSOR_PARALLEL` and
the plan's axes, on parameters of the meta device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vitpar.models.config import ViTConfig
from vitpar.models.vit import ViT
from vitpar.parallel.pipeline import stage_layers
from vitpar.strategy import BatchArithmetic, Plan, Role, batch_arithmetic, stages_of_rank


@dataclass(frozen=True)
class PipelineRank:
    """What the ranks at one place of the pp axis hold.

    stages: their numbers, several under an interleaved schedule. layers: the names of each of these stages' layers.
    flops_share: the part of the model's FLOPs computed here, 0 to 1. parameters: elements on the fullest rank here.
    state_bytes: what it keeps for them (parameters, gradients, optimizer state; no activations, no gathered copies).
    """

    pp: int
    stages: tuple[int, ...]
    layers: tuple[tuple[str, ...], ...]
    flops_share: float
    parameters: int
    state_bytes: int


@dataclass(frozen=True)
class AxisSummary:
    """One axis of the mesh, and the communication along it in a training step, in words."""

    role: Role
    degree: int
    communication: str


@dataclass(frozen=True)
class PlanSummary:
    """A plan applied to a model. parameters: elements of the whole model. idle_share: see `idle_share`."""

    parameters: int
    batch: BatchArithmetic
    idle_share: float
    pipeline: tuple[PipelineRank, ...]
    axes: tuple[AxisSummary, ...]


def summarize(config: ViTConfig, plan: Plan, batch_size: int, bytes_per_parameter: int) -> PlanSummary:
    """The summary of `plan`, which fits `config` and `batch_size` (``vitpar.strategy.validate``).

    bytes_per_parameter: what a rank keeps for every element of its parameters (``vitpar.train.state``).
    """
    parts, flops = stage_layers(config, plan), config.layer_flops
    held = layer_parameters(config, plan, {})  # the first rank of every axis is the fullest
    pipeline = []
    for pp in range(plan.pipeline_degree):
        stages = stages_of_rank(pp, plan)
        names = [name for stage in stages for name in parts[stage]]
        parameters = sum(held[name] for name in names)
        pipeline.append(
            PipelineRank(
                pp=pp,
                stages=stages,
                layers=tuple(parts[stage] for stage in stages),
                flops_share=sum(flops[name] for name in names) / config.flops,
                parameters=parameters,
                state_bytes=parameters * bytes_per_parameter,
            )
        )
    batch = batch_arithmetic(plan, batch_size)
    return PlanSummary(
        parameters=sum(layer_parameters(config, Plan(), {}).values()),
        batch=batch,
        idle_share=idle_share(plan, batch.microbatches),
        pipeline=tuple(pipeline),
        axes=tuple(AxisSummary(axis.role, axis.size, communication(axis.role, plan)) for axis in plan.axes),
    )


def idle_share(plan: Plan, microbatches: int) -> float:
    """The part of a step that a pipeline rank waits, 0 to 1, were all stages equally long and communication free.

    With p ranks, v stages on each and m micro-batches it is (p - 1) / (v·m + p - 1). Source: "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), section 2.2, whose ratio is of
    idle to ideal time.
    """
    waiting = plan.pipeline_degree - 1
    return waiting / (plan.virtual_stages * microbatches + waiting)


def communication(role: Role, plan: Plan) -> str:
    """What ranks along the axis `role` send each other in a training step, in words."""
    match role:
        case "pp":
            return "send activations to the next stage and their gradients back, for every micro-batch"
        case "dp":
            return "all-reduce gradients, once a step"
        case "fsdp" if plan.pipeline_degree > 1:  # see `reshard` in vitpar.parallel.parallelize
            return "all-gather parameters and reduce-scatter gradients, once a step"
        case "fsdp":
            return (
                "all-gather parameters layer by layer, in forward and in backward of every micro-batch; "
                "reduce-scatter gradients, once a step"
            )
        case "tp":
            return "all-reduce activations, twice a block in forward and twice in backward, for every micro-batch"


def layer_parameters(config: ViTConfig, plan: Plan, place: Mapping[Role, int]) -> dict[str, int]:
    """How many elements of each layer's parameters a rank of its stage keeps, by the layer's name.

    place: the rank's index along tp and fsdp, 0 where it is not given.
    """
    with torch.device("meta"):
        model = ViT(config, ("stem", "blocks.0", "head"))  # the blocks are alike
    held = {name: _elements(layer, plan, place) for name, layer in model.layers().items()}
    return {name: held["blocks.0" if name.startswith("blocks.") else name] for name in config.layer_names}


def _elements(layer: nn.Module, plan: Plan, place: Mapping[Role, int]) -> int:
    """The elements of `layer` that a rank keeps: split over tp as the layer declares, then over fsdp along dim 0."""
    tp, fsdp = plan.strategy.degree("tp"), plan.strategy.degree("fsdp")
    total = 0
    for name, parameter in layer.named_parameters():
        shape = list(parameter.shape)
        dim = _tensor_parallel_dim(layer.TENSOR_PARALLEL.get(name.rpartition(".")[0]), len(shape))
        if dim is not None:
            shape[dim] = chunk_length(shape[dim], tp, place.get("tp", 0))
        shape[0] = chunk_length(shape[0], fsdp, place.get("fsdp", 0))
        total += torch.Size(shape).numel()
    return total


def _tensor_parallel_dim(split: str | None, dims: int) -> int | None:
    """Which dim of a parameter with `dims` dims is split over tp (table in ``vitpar.parallel.tensor``), or None."""
    match split:
        case None | "heads":
            return None
        case "column":
            return 0
        case "row" | "row_replicated_input":
            return 1 if dims > 1 else None  # a bias is added once, after the sum over the ranks
    raise AssertionError(f"unknown split {split}")


def chunk_length(length: int, parts: int, index: int) -> int:
    """The length of part `index` of `parts`, as torch.chunk deals them: full ones first, the last may be empty."""
    full = -(-length // parts)
    return max(0, min(full, length - index * full))
