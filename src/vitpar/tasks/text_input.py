"""Input of text: every rank reads the complete batch, because ids are small, and masks it by the sequences' keys."""

from __future__ import annotations

from collections.abc import Callable

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
from vitpar.tasks.image_data import order_of
from vitpar.tasks.input import EvalInput, Input
from vitpar.tasks.task import StepInput
from vitpar.tasks.text import TextTask

THREADS = 1
"""Reading threads by default."""


class TextInput(Input):
    """Input of one rank of a model of text, as ``vitpar.tasks.input.Input`` describes it."""

    def __init__(self, recipe: Recipe, model: ParallelModel, task: TextTask) -> None:
        task.refuse_model(model.config)
        self._recipe, self._model, self.task = recipe, model, task
        self.local = local_ranks()
        self.small_samples = False
        self.workers = THREADS if recipe.data.workers is None else recipe.data.workers
        self._rows = torch.tensor(model.image_rows(model.batch_size)) if model.takes_images else None

    def cache(self, *sets: TextSet | None) -> None:
        """Keep nothing: files of text are small, and the system caches them."""

    def train_batches(self, data: TextSet, start: int = 0, sizes: Callable[[int], int] | None = None) -> TextLoader:
        assert sizes is None, "text has no images"
        order = order_of(self._recipe, len(data))
        return TextLoader(data, order=order, batch_size=self._model.batch_size, start=start, workers=self.workers)

    def train_step(self, batch: TextBatch) -> StepInput:
        return self._given(batch.ids.numpy(), batch.lengths.numpy(), batch.keys)

    def eval_batches(self, data: TextSet) -> TextLoader:
        return TextLoader(data, batch_size=self._model.batch_size, workers=self.workers)

    def eval_step(self, batch: TextBatch) -> EvalInput:
        given = self._given(batch.ids.numpy(), batch.lengths.numpy(), batch.keys)
        labels = batch.numbers.clamp(max=0)  # IGNORED for padding, else 0
        return EvalInput(given.images, given.targets, self._sent(labels), given.sides)

    def synthetic(self) -> StepInput:
        """Return random ids of a batch, to time steps with."""
        text, size = self.task.text, self._model.batch_size
        draw = np.random.default_rng(0)
        plain = np.setdiff1d(np.arange(text.vocab_size), text.specials.all)
        ids, keys = draw.choice(plain, (size, text.tokens)), torch.arange(size)
        return self._given(ids, np.full(size, text.tokens), keys)

    def _given(self, ids: NDArray[np.int64], lengths: NDArray[np.int64], keys: Tensor) -> StepInput:
        whole = self.task.given(self.task.prepare(ids, lengths, keys.numpy()), self._model.config)
        assert whole.images is not None, "`given` returns all inputs"
        inputs = None if self._rows is None else self._sent(whole.images[self._rows])
        sides = {name: self._sent(side) for name, side in whole.sides.items()}
        return StepInput(inputs, self._sent(whole.targets), self._sent(keys), sides)

    def _sent(self, tensor: Tensor) -> Tensor:
        if self._model.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._model.device, non_blocking=True)

    def skipped(self, loader: object) -> Skipped:
        """Return nothing: damaged text ends a run."""
        return Skipped()
