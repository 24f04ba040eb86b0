"""Loaders of one rank's batches from a stream.

Each rank that decodes images reads its own shards, so only that rank knows their samples. A batch therefore has the
labels and keys of the rank's own rows only, and the training loop exchanges them between ranks. All ranks have the same
number of batches, because loaders never end.
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

_AHEAD = 2  # batches that are fetched ahead of those being decoded
_GOES_ON = 0x60E5  # separates the seeds of resumed runs from other hashes of the seed
T = TypeVar("T")


class _Streamed(Loader):
    """Base class of loaders of one part of a stream. Batches that are `ended` follow the last sample, without end.

    part: part of the stream that this rank reads; None for a rank without rows, which reads nothing.
    workers: number of decoding threads; if above 0, another thread reads ahead.
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
        """Yield the samples of this loader, in order."""
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
        """Yield jobs with one sample per row of this rank; the last one may have fewer samples."""
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
    """Endless training batches of a stream.

    Each part continues with its next pass over the data without waiting for the others, so parts may have different
    numbers of images.

    seed: seed of the order of shards and samples, and of all augmentation.
    part: part of the stream that this rank reads; None for a rank without rows.
    start: global samples seen before, by a run that is resumed. The position of every part within its pass is not
        known, so reading begins with the next pass. Its order also depends on `start`, so that a run that is
        interrupted often does not see the beginning of the same pass repeatedly.
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
    """Every sample of a stream once, in stored order; then batches that are `ended`, without end.

    The evaluation loop stops when the batches of all ranks are `ended`.

    part: part of the stream that this rank reads, which may be without shards; None for a rank without rows.
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
    """Yield `items`, which a thread produces up to _AHEAD items ahead of the consumer to hide pauses of the network.

    Closing the iterator sets `stopping`, which must end `items`, and joins the thread.
    """
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
        except BaseException as error:  # raised again in the consumer
            put(None, error)

    # A daemon thread, so that a program that never closes its loader can still exit.
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
