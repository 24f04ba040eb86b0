"""Part of a batch that one rank computes: rows of images and outputs, shapes of what stages send, and evaluation."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vitpar.models.config import ModelConfig
from vitpar.models.description import TensorSpec
from vitpar.parallel.pipeline import StageModule
from vitpar.strategy import ActivationPart, Plan, batch_arithmetic, rank_of_stage
from vitpar.strategy.layout import copies, image_layout, output_layout
from vitpar.strategy.stages import travel_layouts


class BatchPart:
    """Part of every batch that the ranks with one place in their stages compute.

    batch_size: samples of a training batch.
    stage_rank: this rank's place among the ranks of its stage.
    """

    def __init__(self, config: ModelConfig, plan: Plan, batch_size: int, stage_rank: int) -> None:
        strategies = tuple(plan.strategies(config.layer_names).values())
        self._image_layout, outputs = image_layout(strategies[0]), output_layout(strategies[-1])
        self.batch = batch_arithmetic(plan, batch_size)
        self.images, self.outputs = self._image_layout[stage_rank], outputs[stage_rank]
        self.output_copies = copies(outputs, stage_rank)
        """Ranks of the stage, this one included, that have the same outputs."""
        self.first_of_outputs = self.output_copies[0] == stage_rank
        """Whether this rank is the first of `output_copies`."""
        self.travel = tuple(layout[stage_rank] for layout in travel_layouts(config, plan))
        """Layout of what each stage gives the next one."""

    def image_groups(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return `ranks`, those of the first stage, grouped by those that take the same images."""
        groups = {tuple(copies(self._image_layout, stage_rank)) for stage_rank in range(len(ranks))}
        return [[ranks[stage_rank] for stage_rank in group] for group in sorted(groups)]

    def pieces(self, batch: int) -> list[int]:
        """Return the sizes in which `batch` images are evaluated: micro-batches as in training, then the remainder."""
        ends = [*range(0, batch, self.batch.microbatch_rows), batch]
        return [end - start for start, end in pairwise(ends)]

    def rows(self, part: ActivationPart, batch: int) -> list[int]:
        """Return the indices of the rows of `part`: its share of each micro-batch, one micro-batch after another."""
        indices, start = [], 0
        for size in self.pieces(batch):
            indices += [start + row for row in part.row_range(size)]
            start += size
        return indices

    def tokens(self, index: int, given: TensorSpec, batch: int) -> tuple[int, int, int]:
        """Return the shape of this rank's part of `given`, what stage `index` gives for `batch` images."""
        part = self.travel[index]
        rows = sum(len(part.row_range(piece)) for piece in self.pieces(batch))
        return rows, given.tokens, len(part.feature_range(given.features))

    def of_stage(
        self, index: int, config: ModelConfig, given: Sequence[TensorSpec], features: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return input and output of stage `index` for a micro-batch, on the meta device: a pipeline's are static.

        config: the model, with one image size.
        given: what each stage gives.
        features: number of the outputs' features that this rank has.
        dtype: in which the model computes.
        """
        n = self.batch.microbatch_rows
        takes: tuple[int, ...] = (len(self.images.row_range(n)), *config.input.shape)
        gives: tuple[int, ...] = (len(self.outputs.row_range(n)), *config.output_shape[:-1], features)
        taken = dtype if config.input.dtype is None else getattr(torch, config.input.dtype)
        if index > 0:
            takes, taken = self.tokens(index - 1, given[index - 1], n), dtype
        if index < len(given) - 1:
            gives = self.tokens(index, given[index], n)
        return torch.empty(takes, dtype=taken, device="meta"), torch.empty(gives, dtype=dtype, device="meta")


class BatchEvaluation:
    """This rank's stages in evaluation mode: a batch goes from stage to stage, outside the pipeline's schedule.

    The schedule's shapes are static, and at every switch from training it would set up its receive buffers again.

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

    def run(
        self, images: Tensor | None, batch: int, sides: Mapping[str, Tensor], given: Sequence[TensorSpec]
    ) -> Tensor | None:
        """Run a batch through the stages, exchanging tokens with other ranks, and return the last one's output.

        given: what each stage gives.
        """
        x, last = images, self._plan.num_stages - 1
        for index, stage in self._stages.items():
            stage.eval()
            part = self._part.travel[index - 1] if index > 0 else self._part.images
            if index > 0 and index - 1 not in self._stages:
                shape = self._part.tokens(index - 1, given[index - 1], batch)
                x = torch.empty(shape, dtype=self._dtype, device=self._device)
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
