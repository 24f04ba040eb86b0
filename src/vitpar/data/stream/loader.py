"""One rank's batches of a stream.

Each rank that decodes images reads shards of its own, so only it knows which samples they hold: a batch has the labels
and keys of its own rows, and whoever trains brings them together. Every rank has as many batches as every other.
"""

import math
import queue
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import TypeVar, Unpack

import numpy as np

from vitpar.data.loader import BatchJob, Loader, LoaderSettings
from vitpar.data.randomness import hash_numbers
from vitpar.data.stream.stream_set import Fetched, Reader, Sample, StreamPart, StreamSet
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.models import IGNORED

_AHEAD = 2  # batches that are fetched beyond those that are being decoded
_GOES_ON = 0x60E5  # sets the seeds of runs that go on apart from other hashes of their seed
T = TypeVar("T")


class _Streamed(Loader):
    """Batches of the samples that a part of the readers takes from a stream; then batches that are `ended`.

    part: who reads here, None for a rank that reads nothing and has no rows. workers: with any decoding threads, there
    is also one that reads ahead.
    """

    whole = False

    def __init__(
        self,
        data: StreamSet,
        transform: TrainTransform | EvalTransform,
        part: StreamPart | None,
        *,
        seed: int,
        start: int = 0,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(data, transform, start, **settings)
        self._data, self._part, self._seed = data, part, seed
        assert (part is not None) == bool(len(self.rows)), f"part {part} has {len(self.rows)} rows"

    def _samples(self, reader: Reader) -> Generator[Sample]:
        """Yield the samples that this loader gives, in order."""
        raise NotImplementedError

    def _jobs(self) -> Generator[BatchJob]:
        if self._part is not None:
            stopping = threading.Event()
            reader = Reader(self._data, self._part, self._seed, bad_sample=self.bad_sample, stopping=stopping)
            read = self._read(reader)
            with closing(_ahead(read, stopping) if self.workers else read) as jobs:
                yield from jobs
        while True:
            yield self._job((), ended=True)

    def _read(self, reader: Reader) -> Generator[BatchJob]:
        """Yield jobs of as many samples as there are rows; the last one perhaps of fewer."""
        with closing(self._samples(reader)) as samples:
            while True:
                taken = list(islice(samples, len(self.rows)))
                if not taken and not reader.skipped and not reader.broken:
                    return
                job = self._job(taken)
                job.skipped, job.broken, reader.skipped, reader.broken = reader.skipped, reader.broken, [], []
                yield job

    def _job(self, taken: Sequence[Sample], ended: bool = False) -> BatchJob:
        numbers, labels = np.full((2, self.batch_size), IGNORED, dtype=np.int64)
        keys = np.zeros(self.batch_size, np.int64)
        used = self.rows[: len(taken)]
        numbers[used], labels[used] = np.arange(len(taken)), [sample.label for sample in taken]
        keys[used] = [sample.key for sample in taken]
        return BatchJob(Fetched(taken), numbers, keys, labels, ended=ended)


class StreamLoader(_Streamed):
    """Endless training batches. Each part goes on into its next pass over the data without waiting for the others, so
    their number does not depend on how many images a shard has.

    start: global samples seen before, by a run that goes on: reading begins with the pass after that which they end in,
    because where every part was in it is not known, and in an order of its own, so that a run that is stopped often
    does not see the beginning of one pass again and again. seed: of the order of shards and samples and of all
    augmentation. part: see `StreamPart`; None for a rank without rows.
    """

    def __init__(
        self,
        data: StreamSet,
        transform: TrainTransform,
        *,
        seed: int,
        part: StreamPart | None = StreamPart(0, 1),
        start: int = 0,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        own = int(hash_numbers(_GOES_ON, seed, start)[0] >> np.uint64(1)) if start else seed
        super().__init__(data, transform, part, seed=own, start=start, **settings)

    def _samples(self, reader: Reader) -> Generator[Sample]:
        return reader.endless(math.ceil(self.start / len(self._data)))


class StreamEvalLoader(_Streamed):
    """Every sample of a stream once, in the order in which it is stored; then batches that are `ended`, without end.

    Who evaluates stops when all ranks have ended. part: as in `StreamLoader`; it needs to have no shard.
    """

    def __init__(
        self,
        data: StreamSet,
        transform: EvalTransform,
        *,
        part: StreamPart | None = StreamPart(0, 1),
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(data, transform, part, seed=0, **settings)

    def _samples(self, reader: Reader) -> Generator[Sample]:
        return reader.once()


def _ahead(items: Generator[T], stopping: threading.Event) -> Generator[T]:
    """`items`, made by a thread that is a little ahead of who takes them, so that a network's pauses are not waited
    for. Closing the iterator sets `stopping`, at which `items` have to end, and ends the thread."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(_AHEAD)

    def put(item: T | None, error: BaseException | None) -> None:
        while not stopping.is_set():
            try:
                return ready.put((item, error), timeout=0.2)
            except queue.Full:
                continue

    def work() -> None:
        try:
            with closing(items):
                for item in items:
                    put(item, None)
                    if stopping.is_set():
                        return
            put(None, None)
        except BaseException as error:  # raised again where the items are taken
            put(None, error)

    # A daemon, so that a program that never closes its loader still ends.
    thread = threading.Thread(target=work, name="vitpar-stream", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopping.set()
        thread.join()
