"""Interface of teachers, which make the targets of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from vitpar.parallel import ParallelModel
from vitpar.tasks.task import StepInput


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
        """Return features of images for an evaluation without the task's outputs (``Task.EVALUATES``). Collective.

        images: this rank's images of `at_once` batches or fewer, [rows, channels, size, size], normalised.

        Returns [this rank's outputs, at_once, width]; None where not ``gives_outputs``.
        """
        raise NotImplementedError
