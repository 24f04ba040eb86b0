"""Sources of batches for measured steps: a recipe's data, or random images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

from vitpar.parallel import ParallelModel
from vitpar.parallel.phases import Phase
from vitpar.tasks.image_data import ImageSet
from vitpar.tasks.image_input import Input, synthetic_batch
from vitpar.tasks.task import StepInput, Task
from vitpar.training.recipe import Recipe

Take = Callable[[Phase], StepInput]
"""Function that returns the next batch; it runs its work in phases."""


class Feed(Protocol):
    """Endless source of batches, while it is open."""

    settling: int
    """Number of batches to take before the source delivers at its steady rate."""

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Yield the function that returns batches. Both are collective."""


class Synthetic:
    """Synthetic input: one batch of random images that stays on the device."""

    settling = 1

    def __init__(self, model: ParallelModel, task: Task) -> None:
        self._given = synthetic_batch(model, task)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        yield lambda phase: self._given


class Loaded:
    """Input as in a training: read, decoded and augmented by threads, copied to the device, normalised and mixed.

    Each time it is opened, it continues where it stopped, with empty queues. Collective.
    """

    # Prefetched batches would make the first steps look fast. A loader's queues hold two, a stream's two more.
    settling = 4

    def __init__(self, recipe: Recipe, model: ParallelModel, task: Task, images: ImageSet) -> None:
        self._images, self._input, self._samples = images, Input(recipe, model, task), 0
        self._input.cache(images)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        with closing(iter(self._input.train_batches(self._images, start=self._samples))) as batches:

            def take(phase: Phase) -> StepInput:
                with phase("waiting for data"):
                    batch = next(batches)
                with phase("input"):
                    given = self._input.train_step(batch)
                self._samples = batch.samples
                return given

            yield take
