"""Pipeline parallelism: stages with static shapes, and schedules by name."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, get_schedule_class

from vitpar.models.config import ModelConfig
from vitpar.models.layers import LayeredModel, given_sides
from vitpar.parallel.redistribute import Redistribute
from vitpar.strategy import ActivationPart, Plan

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Stage(PipelineStage):
    """Stage `index` of `count` that opens connections to other ranks only, and skips what frozen layers make needless.

    takes: meta tensor with the shape and dtype of the stage's input for one micro-batch.
    gives: the same of its output.
    passed: whether the input has a gradient, so that it is sent back; None for that of every stage but the first, which
        takes images.
    given: whether the output has one; without it there is no backward.

    upstream: without `input_args` and `output_args` the first step, and each switch between training and evaluation,
    runs a real extra forward of every stage to infer them.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        takes: Tensor,
        gives: Tensor,
        device: torch.device,
        group: ProcessGroup,
        *,
        passed: bool | None = None,
        given: bool = True,
    ) -> None:
        self._passed, self._given = index > 0 if passed is None else passed, given
        self._losses: dict[int, Tensor | None] = {}  # of micro-batches whose backward was put off
        inside, outside = (takes.requires_grad_(self._passed),), (gives.requires_grad_(given),)
        super().__init__(module, index, count, device, input_args=inside, output_args=outside, group=group)

    # upstream: in torch 2.11 the first step of a schedule sends a number between neighbouring stages to connect them.
    # In a V-shaped schedule two neighbours can be on one rank, and gloo cannot send to its own rank.
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        own = self.stage_index_to_group_rank[self.stage_index]
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return super().get_bwd_recv_ops(bwd_chunk_id) if self._given else []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self._passed:
            return super().get_bwd_send_ops(bwd_chunk_id)
        self.bwd_cache.pop(bwd_chunk_id, None)
        return []

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        # upstream: torch 2.11 refuses the missing gradient of an output from the next stage, if both are on one rank.
        if self._given:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if self._given and (full_backward or self._passed or self.is_first):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            return
        self.bwd_cache[bwd_chunk_id] = (None,)
        if not self._given:
            del self.fwd_cache[bwd_chunk_id]
        elif not full_backward:
            # upstream: torch finds the gradients of weights behind those of the input. A stage whose input has none
            # runs its complete backward in place of that of weights, which torch only does for the first stage.
            self._losses[bwd_chunk_id] = loss

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if self._given and (self._passed or self.is_first):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        elif self._given:
            super().backward_one_chunk(bwd_chunk_id, self._losses.pop(bwd_chunk_id), True, last_backward)
            del self.bwd_cache[bwd_chunk_id]


def build_schedule(
    plan: Plan, stages: Sequence[PipelineStage], microbatches: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Schedule:
    """Return the plan's schedule over this rank's stages.

    microbatches: number of micro-batches in a step.
    loss: loss of one micro-batch from outputs and targets, already divided by the global batch size.
    """
    # scale_grads=False: `loss` divides by the global batch, so the gradients of micro-batches just add up. AdamW and
    # clipping would hide a wrong scale in the loss curve (upstream: torchtitan#2972).
    kind = get_schedule_class(plan.schedule)
    if issubclass(kind, PipelineScheduleMulti):
        return kind(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    (stage,) = stages
    return kind(stage, microbatches, loss_fn=loss, scale_grads=False)


class StageModule(LayeredModel):
    """Module of one pipeline stage: the layers `names` of a model, each computing this rank's part of a micro-batch."""

    def __init__(self, config: ModelConfig, names: Collection[str]) -> None:
        super().__init__(config, names)
        self.before: dict[str, Redistribute] = {}
        """Redistribution of the activation before a layer, by the layer's name; absent where the layouts agree."""
        self.after: Redistribute | None = None
        """Redistribution behind the last layer, to the layout in which the tokens are sent."""
        self.rows: dict[str, ActivationPart] = {}
        """This rank's part of the batch in each layer, by name."""
        self.group_rows: dict[str, ActivationPart] = {}
        """Part of the batch that the layer's tensor-parallel group computes, by name."""

    def forward(self, x: Tensor, keys: Tensor | None = None, **sides: Tensor) -> Tensor:
        """Return this rank's part of the tokens or outputs.

        x: this rank's part of the images or tokens.
        keys: int64 [rows of the micro-batch over all ranks], random keys of the samples; None without drop-path and
            dropout.
        sides: other side inputs by name, [rows of the micro-batch over all ranks, …].
        """
        every = (*sides.values(), *(() if keys is None else (keys,)))
        total = len(every[0]) if every else 0
        for name, layer in self.layers().items():
            if name in self.before:
                x = self.before[name](x)
            rows, group = (part[name].row_range(total) for part in (self.rows, self.group_rows))
            here, inside = slice(rows.start, rows.stop), slice(group.start, group.stop)
            x = layer(x, **given_sides(layer, keys, sides, here, inside))
        # upstream: zero-bubble schedules call detach_() on a stage's output, which fails on a view. Redistribute
        # returns a new tensor, so no clone is needed.
        return x if self.after is None else self.after(x)
