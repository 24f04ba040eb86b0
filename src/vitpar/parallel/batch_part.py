"""Part of a batch that one rank computes: rows of images and outputs, and shapes of what stages send."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vitpar.models.config import ModelConfig
from vitpar.strategy import ActivationPart, Plan, batch_arithmetic, image_layout, output_layout, stage_layers
from vitpar.strategy.layout import copies
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


class StageShapes:
    """Static shapes of a pipeline for images of one size.

    config: the model with this image size. whole: the model, which decides the stages.
    features: part of the outputs' features that this rank has.
    """

    def __init__(
        self,
        config: ModelConfig,
        whole: ModelConfig,
        plan: Plan,
        part: BatchPart,
        features: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._config, self._part, self._features, self._dtype = config, part, features, dtype
        self._given = tuple(config.layers[names[-1]].gives for names in stage_layers(whole, plan))

    def tokens(self, index: int, batch: int) -> tuple[int, int, int]:
        """Return the shape of this rank's part of what stage `index` gives the next one, for `batch` images."""
        part, given = self._part.travel[index], self._given[index]
        rows = sum(len(part.row_range(piece)) for piece in self._part.pieces(batch))
        return rows, given.tokens, len(part.feature_range(given.features))

    def of_stage(self, index: int) -> tuple[Tensor, Tensor]:
        """Return input and output of stage `index` for a micro-batch, on the meta device."""
        c, part, n = self._config, self._part, self._part.batch.microbatch_rows
        takes: tuple[int, ...] = (len(part.images.row_range(n)), *c.input.shape)
        gives: tuple[int, ...] = (len(part.outputs.row_range(n)), *c.output_shape[:-1], len(self._features))
        taken = self._dtype if c.input.dtype is None else getattr(torch, c.input.dtype)
        if index > 0:
            takes, taken = self.tokens(index - 1, n), self._dtype
        if index < len(self._given) - 1:
            gives = self.tokens(index, n)
        return torch.empty(takes, dtype=taken, device="meta"), torch.empty(gives, dtype=self._dtype, device="meta")
