"""Pipeline parallelism: stages with static shapes, schedules by name, and what travels between stages."""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from vitpar.models.config import ViTConfig
from vitpar.models.vit import ViT
from vitpar.parallel.redistribute import Redistribute
from vitpar.strategy import ActivationPart, Plan, Strategy, rank_of_stage, split_blocks, token_layout
from vitpar.strategy.layout import Layout

CLASSES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleavedzerobubble": ScheduleInterleavedZeroBubble,
    "zbvzerobubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def stage_layers(config: ViTConfig, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The names of each stage's layers: blocks as the plan splits them, embed before the first, the head after the
    last."""
    costs = [float(flops) for flops in config.layer_flops.values()]
    stages = [
        [f"blocks.{i}" for i in blocks] for blocks in split_blocks(config.depth, plan.num_stages, plan.split, costs)
    ]
    stages[0].insert(0, "embed")
    stages[-1].append("head")
    return tuple(tuple(names) for names in stages)


def travel_layouts(config: ViTConfig, plan: Plan) -> tuple[Layout, ...]:
    """The layouts in which tokens travel from each stage to the next."""
    strategies, parts = plan.strategies(config.layer_names), stage_layers(config, plan)
    return tuple(travel_layout(strategies[before[-1]], strategies[behind[0]]) for before, behind in pairwise(parts))


def travel_layout(before: Strategy, behind: Strategy) -> Layout:
    """The layout in which tokens travel between stages: of what the last layer before gives and the first layer behind
    takes, the one with the smaller parts."""
    given, taken = token_layout(before), token_layout(behind)
    return taken if taken[0].share < given[0].share else given


class _NeighbourStage(PipelineStage):
    """A stage that opens connections to other ranks only.

    upstream: in torch 2.11 a schedule's first step sends a number between neighbouring stages to connect them. In a
    V-shaped schedule neighbours can be on one rank, and gloo cannot send to its own rank.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        own = self.stage_index_to_group_rank[self.stage_index]
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


def pipeline_stage(
    module: nn.Module, index: int, count: int, takes: Tensor, gives: Tensor, device: torch.device, group: ProcessGroup
) -> PipelineStage:
    """Stage `index` of `count`. takes, gives: tensors on meta like those of a micro-batch, so that no shape has to be
    found by an extra forward.

    upstream: without `input_args` and `output_args` the first step runs a real forward of each stage to infer them.
    """
    return _NeighbourStage(
        module,
        index,
        count,
        device,
        input_args=(takes.requires_grad_(index > 0),),
        output_args=(gives.requires_grad_(),),
        group=group,
    )


def build_schedule(
    plan: Plan, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The plan's schedule over this rank's stages.

    Gradients are not rescaled: `loss` divides by the global batch already.
    """
    kind = CLASSES[plan.schedule]
    if issubclass(kind, PipelineScheduleMulti):
        return kind(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    (stage,) = stages
    return kind(stage, microbatches, loss_fn=loss, scale_grads=False)


def send_tokens(tokens: Tensor, index: int, plan: Plan, pipe: DeviceMesh) -> tuple[dist.Work, Tensor]:
    """Start sending the output of stage `index` to the next stage's rank; the tensor must live until the work is done.

    Evaluation passes whole batches from stage to stage itself, outside the schedule, whose shapes are static and which
    would switch its buffers at every change between training and evaluation.
    """
    work = dist.isend(tokens, group=pipe.get_group(), group_dst=rank_of_stage(index + 1, plan))
    assert work is not None
    return work, tokens


def receive_tokens(
    index: int, plan: Plan, pipe: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The input of stage `index`, which `send_tokens` sent on the rank of the stage before."""
    tokens = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(tokens, group=pipe.get_group(), group_src=rank_of_stage(index - 1, plan))
    return tokens


class StageModule(ViT):
    """The layers `names` of a model, each computing this rank's part of a micro-batch.

    before: what to do with the activation before a layer, by its name. after: and behind the last layer.
    rows: this rank's part of the batch in every layer, by name.
    """

    def __init__(self, config: ViTConfig, names: Collection[str]) -> None:
        super().__init__(config, names)
        self.before: dict[str, Redistribute] = {}
        self.after: Redistribute | None = None
        self.rows: dict[str, ActivationPart] = {}

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """x: this rank's part of the images or tokens. keys: int64, those of the whole micro-batch, or None."""
        for name, layer in self.layers().items():
            if name in self.before:
                x = self.before[name](x)
            here = None
            if keys is not None:
                rows = self.rows[name].row_range(len(keys))
                here = keys[rows.start : rows.stop]
            x = layer(x) if name == "head" else layer(x, here)
        return x if self.after is None else self.after(x)
