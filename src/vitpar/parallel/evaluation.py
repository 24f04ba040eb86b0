"""Evaluation of a batch outside the pipeline's schedule: from stage to stage.

The schedule's shapes are static, and at every switch from training it would set up its receive buffers again.
"""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vitpar.parallel.batch_part import BatchPart, StageShapes
from vitpar.parallel.pipeline import StageModule
from vitpar.strategy import Plan, rank_of_stage


class BatchEvaluation:
    """This rank's stages in evaluation mode.

    pipe: mesh (pp, stage) over the world.
    dtype: of tokens between stages.
    """

    def __init__(
        self,
        plan: Plan,
        pipe: DeviceMesh,
        stages: Mapping[int, StageModule],
        part: BatchPart,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._plan, self._group, self._stages, self._part = plan, pipe.get_group("pp"), stages, part
        self._dtype, self._device = dtype, device
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, images: Tensor | None, batch: int, sides: Mapping[str, Tensor], shapes: StageShapes) -> Tensor | None:
        """Run a batch through the stages, exchanging tokens with other ranks, and return the last one's output."""
        x, last = images, self._plan.num_stages - 1
        for index, stage in self._stages.items():
            stage.eval()
            part = self._part.travel[index - 1] if index > 0 else self._part.images
            if index > 0 and index - 1 not in self._stages:
                x = torch.empty(shapes.tokens(index - 1, batch), dtype=self._dtype, device=self._device)
                dist.recv(x, group=self._group, group_src=rank_of_stage(index - 1, self._plan))
            assert x is not None, "a rank that holds embed needs images"
            sizes = self._part.pieces(batch)
            pieces = x.split([len(part.row_range(n)) for n in sizes])
            beside = {name: side.split(sizes) for name, side in sides.items()}
            x = torch.cat(
                [
                    stage(piece, **{name: side[number] for name, side in beside.items()})
                    for number, piece in enumerate(pieces)
                ]
            )
            if index < last and index + 1 not in self._stages:
                work = dist.isend(x, group=self._group, group_dst=rank_of_stage(index + 1, self._plan))
                assert work is not None
                self._sent.append((work, x))  # the tensor must stay alive until then
        return x

    def wait(self, but: int = 0) -> None:
        """Wait until tokens are sent, except the last `but` messages."""
        while len(self._sent) > but:
            self._sent.popleft()[0].wait()
