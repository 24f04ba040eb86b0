"""Interface of inputs: batches of a data set as tensors of a step, on the rank that needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from vitpar.data.loader import Skipped
from vitpar.launch.local_ranks import LocalRanks
from vitpar.tasks.task import StepInput


class EvalInput(NamedTuple):
    """Input of an evaluation batch on one rank."""

    images: Tensor | None
    """This rank's input of the model; None where the model takes none."""
    targets: Tensor
    """Targets of the complete batch; of this rank's outputs under ``Task.LOCAL_TARGETS``."""
    labels: Tensor
    """Label of each sample of the complete batch, int64 [batch]; IGNORED for padding and what cannot be read."""
    sides: Mapping[str, Tensor] = {}
    """Further inputs of the complete batch by name (``ModelConfig.side_inputs``)."""


class Batches(Protocol):
    """Loader of batches."""

    def __iter__(self) -> Generator[Any]:
        """Begin anew."""


class Input(Protocol):
    """Input of one rank of a model. All ranks make it together, and call its methods together."""

    task: Any
    """Says what labels are to the loss."""
    workers: int
    """Threads that prepare samples."""
    small_samples: bool
    """Whether samples are so small that several threads prepare no more of them than one."""
    local: LocalRanks
    """The ranks of this machine, and the cores of this one."""

    def cache(self, train: Any, val: Any = None) -> str | None:
        """Keep decoded images in memory from now on, if the recipe says so, and return a message.

        Also choose the number of threads for the size of these images.

        train, val: data that is trained on, and evaluated on, more than once; streams are not cached.

        Raises DataError, on all ranks, if there is no memory for it, and for images that cannot be held on a device.
        """

    def train_batches(self, data: Any, start: int = 0, sizes: Callable[[int], int] | None = None) -> Batches:
        """Return a loader of all global batches after `start` samples, without end.

        sizes: function from the samples before a batch to the side of its images in pixels; None for the model's.
        """

    def train_step(self, batch: Any) -> StepInput:
        """Return the input of a step."""

    def eval_batches(self, data: Any) -> Batches:
        """Return a loader of the complete set in batches of the training shape. The last one is padded."""

    def eval_step(self, batch: Any) -> EvalInput | None:
        """Return the input of an evaluation batch; None when no rank has samples left."""

    def synthetic(self) -> StepInput:
        """Return random input of a batch, to time steps with."""

    def skipped(self, loader: Any) -> Skipped:
        """Return what all ranks skipped together."""

    def warning(self, loader: Any) -> str | None:
        """Return a warning about what all ranks skipped together; None if nothing. Collective as `skipped` is."""
        return self.skipped(loader).words
