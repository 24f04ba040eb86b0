"""Pipeline parallelism: stages with static shapes, and schedules by name."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from vitpar.models.config import ViTConfig
from vitpar.strategy import Plan, split_blocks

SCHEDULES: dict[str, type[PipelineScheduleSingle] | type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved1f1b": ScheduleInterleaved1F1B,
}


def stage_layers(config: ViTConfig, plan: Plan) -> tuple[tuple[str, ...], ...]:
    """The names of each stage's layers: blocks as the plan splits them, the stem before the first, the head after the
    last."""
    costs = [float(flops) for flops in config.layer_flops.values()]
    stages = [
        [f"blocks.{i}" for i in blocks] for blocks in split_blocks(config.depth, plan.num_stages, plan.split, costs)
    ]
    stages[0].insert(0, "stem")
    stages[-1].append("head")
    return tuple(tuple(names) for names in stages)


def pipeline_stage(
    module: nn.Module,
    index: int,
    count: int,
    config: ViTConfig,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    group: ProcessGroup,
) -> PipelineStage:
    """Stage `index` of `count` with the shapes of a micro-batch of `batch` images given, so that none is found by an
    extra forward.

    upstream: without `input_args` and `output_args` the first step runs a real forward of each stage to infer them.
    """
    tokens = torch.empty(batch, config.tokens, config.width, dtype=dtype, device="meta")
    images = torch.empty(batch, config.channels, config.image_size, config.image_size, dtype=dtype, device="meta")
    logits = torch.empty(batch, config.num_classes, dtype=dtype, device="meta")
    first, last = index == 0, index == count - 1
    return PipelineStage(
        module,
        index,
        count,
        device,
        input_args=(images if first else tokens.requires_grad_(),),
        output_args=(logits.requires_grad_() if last else tokens.detach().requires_grad_(),),
        group=group,
    )


def build_schedule(
    plan: Plan, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> PipelineScheduleSingle | PipelineScheduleMulti:
    """The plan's schedule over this rank's stages.

    Gradients are not rescaled: `loss` divides by the global batch already.
    """
    kind = SCHEDULES[plan.schedule]
    if issubclass(kind, PipelineScheduleMulti):
        return kind(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    (stage,) = stages
    return kind(stage, microbatches, loss_fn=loss, scale_grads=False)


def send_tokens(tokens: Tensor, index: int, plan: Plan, pipe: DeviceMesh) -> tuple[dist.Work, Tensor]:
    """Start sending the output of stage `index` to the next stage's rank; the tensor must live until the work is done.

    Evaluation passes whole batches from stage to stage itself, outside the schedule, whose shapes are static and which
    would switch its buffers at every change between training and evaluation.
    """
    work = dist.isend(tokens, group=pipe.get_group(), group_dst=(index + 1) % plan.pipeline_degree)
    assert work is not None
    return work, tokens


def receive_tokens(
    index: int, plan: Plan, pipe: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The input of stage `index`, which `send_tokens` sent on the rank of the stage before."""
    tokens = torch.empty(shape, dtype=dtype, device=device)
    dist.recv(tokens, group=pipe.get_group(), group_src=(index - 1) % plan.pipeline_degree)
    return tokens
