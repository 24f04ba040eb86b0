"""Inputs: batches of a data set as tensors of a step, on the rank that needs them; and the input of text.

Every rank reads complete batches of text, because ids are small, and masks them by the sequences' keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.loader import Skipped
from vitpar.data.text.loader import TextBatch, TextLoader
from vitpar.data.text.text_set import TextSet
from vitpar.launch.local_ranks import local_ranks
from vitpar.parallel import ParallelModel
from vitpar.recipe import Recipe
from vitpar.tasks.data import order_of
from vitpar.tasks.task import StepInput, Task
from vitpar.tasks.text import TextTask

THREADS = 1
"""Threads that read text by default."""


class Input:
    """Input of one rank of a model. All ranks make it together, and call its methods together.

    task: says what labels are to the loss.
    """

    workers: int
    """Threads that prepare samples."""
    small_samples = False
    """Whether samples are so small that several threads prepare no more of them than one."""

    def __init__(self, recipe: Recipe, model: ParallelModel, task: Task) -> None:
        self._recipe, self._model = recipe, model
        self.task: Any = task
        self.local = local_ranks()
        """The ranks of this machine, and the cores of this one."""
        self._copies = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    def cache(self, train: Any, val: Any = None) -> str | None:
        """Keep decoded images in memory from now on, if the recipe says so, and return a message.

        Also choose the number of threads for the size of these images.

        train, val: data that is trained on, and evaluated on, more than once; streams are not cached.

        Raises DataError, on all ranks, if there is no memory for it, and for images that cannot be held on a device.
        """
        return None

    def train_batches(self, data: Any, start: int = 0, sizes: Callable[[int], int] | None = None) -> Any:
        """Return a loader of all global batches after `start` samples, without end.

        sizes: function from the samples before a batch to the side of its images in pixels; None for the model's.
        """
        raise NotImplementedError

    def train_step(self, batch: Any) -> StepInput:
        """Return the input of a step."""
        raise NotImplementedError

    def eval_batches(self, data: Any) -> Any:
        """Return a loader of the complete set in batches of the training shape. The last one is padded."""
        raise NotImplementedError

    def eval_step(self, batch: Any) -> tuple[StepInput, Tensor] | None:
        """Return the input of an evaluation batch, and the labels of its samples; None when no rank has samples left.

        The labels are of the complete batch, int64 [batch]; IGNORED for padding and what cannot be read.
        """
        raise NotImplementedError

    def synthetic(self) -> StepInput:
        """Return random input of a batch, to time steps with."""
        raise NotImplementedError

    def skipped(self, loader: Any) -> Skipped:
        """Return what all ranks skipped together."""
        return Skipped()

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the device. On a GPU the copy overlaps with computation that was queued before."""
        if self._copies is None or tensor.is_cuda:
            return tensor
        pinned, computing = tensor.pin_memory(), torch.cuda.current_stream()  # no copy of a pinned tensor
        with torch.cuda.stream(self._copies):
            sent = pinned.to(self._model.device, non_blocking=True)
        computing.wait_stream(self._copies)
        sent.record_stream(computing)
        return sent


class TextInput(Input):
    """Input of one rank of a model of text. Damaged text ends a run, and the system caches its files."""

    def __init__(self, recipe: Recipe, model: ParallelModel, task: TextTask) -> None:
        task.refuse_model(model.config)
        super().__init__(recipe, model, task)
        self.workers = THREADS if recipe.data.workers is None else recipe.data.workers
        self._rows = torch.tensor(model.image_rows(model.batch_size)) if model.takes_images else None

    def train_batches(self, data: TextSet, start: int = 0, sizes: Callable[[int], int] | None = None) -> TextLoader:
        assert sizes is None, "text has no images"
        order = order_of(self._recipe, len(data))
        return TextLoader(data, order=order, batch_size=self._model.batch_size, start=start, workers=self.workers)

    def train_step(self, batch: TextBatch) -> StepInput:
        return self._given(batch.ids.numpy(), batch.lengths.numpy(), batch.keys)

    def eval_batches(self, data: TextSet) -> TextLoader:
        return TextLoader(data, batch_size=self._model.batch_size, workers=self.workers)

    def eval_step(self, batch: TextBatch) -> tuple[StepInput, Tensor]:
        return self.train_step(batch), self.to_device(batch.numbers.clamp(max=0))  # 0 for all but padding

    def synthetic(self) -> StepInput:
        text, size = self.task.text, self._model.batch_size
        draw = np.random.default_rng(0)
        plain = np.setdiff1d(np.arange(text.vocab_size), text.specials.all)
        ids, keys = draw.choice(plain, (size, text.tokens)), torch.arange(size)
        return self._given(ids, np.full(size, text.tokens), keys)

    def _given(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], keys: Tensor) -> StepInput:
        whole = self.task.given(self.task.prepare(ids, lengths, keys.numpy()), self._model.config)
        inputs = None if self._rows is None else self.to_device(whole.images[self._rows])
        sides = {name: self.to_device(side) for name, side in whole.sides.items()}
        return StepInput(inputs, self.to_device(whole.targets), self.to_device(keys), sides)
