"""Sources of batches for measured steps: a recipe's data, or random images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from vitpar.parallel import ParallelModel
from vitpar.parallel.phases import Phase
from vitpar.training.input import Given, ImageSet, Input, synthetic_batch
from vitpar.training.recipe import Recipe

Take = Callable[[Phase], Given]
"""Gives the next batch. What it does is done in phases."""


class Feed(Protocol):
    """Batches without end, while it is open. settling: how many are taken from it before it goes on evenly."""

    settling: int

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Collective, as what it yields is."""


class Synthetic:
    """Synthetic input: one batch of random images that stays on the device."""

    settling = 1

    def __init__(self, model: ParallelModel) -> None:
        self._given = synthetic_batch(model)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        yield lambda phase: self._given


class Loaded:
    """Input as the trainer gets it: read, decoded and augmented by threads, copied to the device, normalised and mixed.

    Each time it is opened it continues where it stopped, with empty queues. Collective.
    """

    settling = 4  # a loader's queues hold two batches, a stream's two more

    def __init__(self, recipe: Recipe, model: ParallelModel, images: ImageSet) -> None:
        self._images, self._input, self._samples = images, Input(recipe, model), 0

    @contextmanager
    def opened(self) -> Iterator[Take]:
        with closing(iter(self._input.train_batches(self._images, start=self._samples))) as batches:

            def take(phase: Phase) -> Given:
                with phase("waiting for data"):
                    batch = next(batches)
                with phase("input"):
                    given = self._input.train_step(batch)
                self._samples = batch.samples
                return given

            yield take
