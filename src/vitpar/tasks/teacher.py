"""Teachers, which make the targets of a training, and the one that is the running average of its student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.launch.world_group import all_reduce_
from vitpar.models.dino.config import GLOBAL
from vitpar.models.layers import zero_sides
from vitpar.parallel import Communication, ParallelModel
from vitpar.parallel.parallelize import parallelize_checked
from vitpar.strategy.freezing import parameter_names
from vitpar.tasks.dino import DINO, dino_of
from vitpar.tasks.soft_loss import log_sums
from vitpar.tasks.task import StepInput

MOMENTUM = 0.9
"""Momentum of the mean of scores that centring subtracts, as in DINOv2."""
ROUNDS = 3
"""Rounds of Sinkhorn-Knopp, as in DINOv2."""


class Teacher:
    """A teacher on one rank. All ranks make it together, and call it together."""

    model: ParallelModel
    """Model of the teacher."""
    folder: Path | None = None
    """Folder of its weights; None for a teacher that is made of its student."""
    average: ParallelModel | None = None
    """Model whose parameters are the running average of the student's; None for a teacher with its own weights."""
    center: Tensor | None = None
    """State that checkpoints keep besides parameters, equal on all ranks; None for none."""

    at_once = 0
    """Batches that `features` takes."""
    width = 0
    """Features of an image."""

    def targets(self, given: StepInput) -> Tensor:
        """Return the targets of a step, as the task takes them. Collective."""
        raise NotImplementedError

    def follow(self, values: Mapping[str, float]) -> None:
        """Take the values of schedules in the coming step (``Task.schedules``)."""

    def features(self, images: Sequence[Tensor | None]) -> Tensor | None:
        """Return features of images for an evaluation without the task's outputs (``Task.AVERAGES``). Collective.

        images: this rank's images of `at_once` batches or fewer, [rows, channels, size, size], normalised.

        Returns [this rank's outputs, at_once, width]; None where not ``gives_outputs``.
        """
        raise NotImplementedError


class SelfTeacher(Teacher):
    """Teacher whose parameters are the average of the student's, which the training keeps, under its plan.

    student: model that is trained.
    """

    def __init__(self, student: ParallelModel, task: DINO) -> None:
        device, config = student.device, task.teacher_config(student.config)
        frozen = frozenset(parameter_names(config))
        alone = replace(student.execution, frozen=frozen, communication=Communication())
        self.at_once, self.width = GLOBAL, dino_of(config).embed_dim
        self.model = self.average = parallelize_checked(config, student.plan, alone, device)
        self._rows = torch.tensor(self.model.output_rows(self.model.batch_size), dtype=torch.int64, device=device)
        centred = torch.zeros(2, task.prototypes, dtype=self.model.precision.parameters, device=device)
        self.center = centred if task.centering == "centering" else None
        """Running means of the scores of class tokens and of patches, [2, prototypes]; None for Sinkhorn-Knopp."""
        self.temperature = task.warmup_teacher_temp
        """Temperature of the coming step."""

    def targets(self, given: StepInput) -> Tensor:
        """Return the targets of a step, as `DINO.total` takes them, for this rank's outputs. Collective."""
        model = self.model
        model.parameters_changed()  # by the average
        images = given.images
        if images is not None:
            images = images[..., : model.config.input.shape[-1]]  # the global crops come first
        scores = model.predict(images, model.batch_size, **given.sides)
        masks = given.sides["masks"]
        if scores is None:
            scores = masks.new_zeros(0, model.config.output_shape[0], 0, dtype=model.precision.parameters)
        scores = scores[:, :-GLOBAL]  # without features
        wide = scores.to(torch.float64 if scores.dtype is torch.float64 else torch.float32)
        counts = self._counts(masks)
        # Class tokens and masked patches are distributed over the prototypes apart.
        both = [(wide[:, :2], wide[:, :2].flatten(0, 1)), (wide[:, 2:], wide[:, 2:][counts])]
        if self.center is None:
            classes, patches = (part / self.temperature + self._offsets(rows / self.temperature) for part, rows in both)
        else:
            here = self._here(wide)
            classes, patches = (
                (part - center[here]) / self.temperature for (part, _), center in zip(both, self.center, strict=True)
            )
            means = torch.stack([self._mean(rows) for _, rows in both])
            self.center.lerp_(means.to(self.center.dtype), 1 - MOMENTUM)
        return torch.cat([classes, patches.masked_fill(~counts[..., None], float("nan"))], dim=1)

    def follow(self, values: Mapping[str, float]) -> None:
        self.temperature = values["teacher_temp"]

    def features(self, images: Sequence[Tensor | None]) -> Tensor | None:
        """Return the features of class tokens. Each batch takes the place of one of the global crops."""
        model = self.model
        model.parameters_changed()  # by the average
        mine = [one.flatten(2) for one in images if one is not None]
        crops = torch.cat([*mine, *mine[-1:] * (GLOBAL - len(mine))], dim=2) if mine else None
        sides = {name: x.bool() for name, x in zero_sides(model.config, model.batch_size, model.device).items()}
        outputs = model.predict(crops, model.batch_size, masks=sides["masks"])
        return None if outputs is None else outputs[:, -GLOBAL:, : self.width]

    def _counts(self, masks: Tensor) -> Tensor:
        """Return which places for masked patches count, bool [rows, places]."""
        slots = dino_of(self.model.config).slots
        here = masks[self._rows] if self.model.gives_outputs else masks[:0]
        number = here.sum(-1, keepdim=True)
        return (torch.arange(slots, device=masks.device) < number).flatten(1)

    def _offsets(self, scores: Tensor) -> Tensor:
        """Return numbers to add to scores, so that a softmax spreads the rows evenly over the prototypes. Collective.

        That is Sinkhorn-Knopp: its last step divides each row by its sum.

        scores: [rows on this rank, this rank's prototypes], over the temperature. The result is [prototypes].
        """
        model, part, prototypes = self.model, self.model.vocabulary, self.model.config.output_shape[1]
        here = self._here(scores)
        offsets, of_rows = scores.new_zeros(scores.shape[1]), scores.new_zeros(len(scores), 1)
        for _ in range(ROUNDS):
            largest = scores.new_full((prototypes,), -torch.inf)
            if len(scores):
                largest[here] = (scores + of_rows).amax(0)
            all_reduce_(largest, dist.ReduceOp.MAX)
            sums = scores.new_zeros(prototypes)
            if len(scores):
                sums[here] = (scores + of_rows - largest[here]).exp().sum(0)
            all_reduce_(sums)
            offsets = -(sums.log() + largest)[here]
            if model.gives_outputs:
                of_rows = -log_sums(scores + offsets, part)
        return offsets.nan_to_num(0.0, posinf=0.0)  # of no rows

    def _mean(self, scores: Tensor) -> Tensor:
        """Return the mean of the scores of all ranks, [prototypes]. Collective. scores: as in `_offsets`."""
        total = scores.new_zeros(self.model.config.output_shape[1] + 1)
        if len(scores):
            total[:-1][self._here(scores)] = scores.sum(0)
        if self.model.first_of_outputs:
            total[-1] = len(scores)
        all_reduce_(total)
        return total[:-1] / total[-1].clamp(min=1)

    def _here(self, scores: Tensor) -> slice:
        """Return this rank's part of the prototypes. No two ranks have the same part for the same rows.

        scores: [..., this rank's prototypes].
        """
        start = 0 if self.model.vocabulary is None else self.model.vocabulary.start
        return slice(start, start + scores.shape[-1])
