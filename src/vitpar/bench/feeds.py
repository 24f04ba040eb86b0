"""Sources of batches for measured steps: a recipe's data, or one random batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from vitpar.data.stream.stream_set import ImageSet
from vitpar.parallel.phases import Phase
from vitpar.tasks.input import Input
from vitpar.tasks.task import StepInput

Take = Callable[[Phase], StepInput]
"""Function that returns the next batch; it runs its work in phases."""


class Feed:
    """Endless source of batches, while it is open.

    images: read, decoded and augmented by threads, copied to the device, normalised and mixed, as in a training. Each
    time the feed is opened, it continues where it stopped, with empty queues. None: one random batch that stays on the
    device.

    Collective.
    """

    def __init__(self, source: Input, images: ImageSet | None = None) -> None:
        self._images, self._input, self._samples = images, source, 0
        # Prefetched batches would make the first steps look fast. A loader's queues hold two, a stream's two more.
        self.settling = 1 if images is None else 4
        """Number of batches to take before the source delivers at its steady rate."""
        if images is not None:
            source.cache(images)

    @contextmanager
    def opened(self) -> Iterator[Take]:
        """Yield the function that returns batches."""
        if self._images is None:
            given = self._input.synthetic()
            yield lambda phase: given
            return
        with closing(iter(self._input.train_batches(self._images, start=self._samples))) as batches:

            def take(phase: Phase) -> StepInput:
                with phase("waiting for data"):
                    batch = next(batches)
                with phase("input"):
                    given = self._input.train_step(batch)
                self._samples = batch.samples
                return given

            yield take
