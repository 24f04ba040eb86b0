"""Loader of one rank's batches from a stream.

Each rank that decodes images reads its own shards, so only that rank knows their samples. A batch therefore has the
labels and keys of the rank's own rows only, and the training loop exchanges them between ranks. All ranks have the same
number of batches, because loaders never end.
"""

import math
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import TypeVar, Unpack

import numpy as np

from vitpar.data.batches import BatchJob
from vitpar.data.loader import Loader, LoaderSettings
from vitpar.data.randomness import hash_numbers
from vitpar.data.stream.stream_set import Fetched, Reader, Sample, StreamPart, StreamSet
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.models import IGNORED

_AHEAD = 2  # batches that are fetched ahead of those being decoded
_GOES_ON = 0x60E5  # separates the seeds of resumed runs from other hashes of the seed
T = TypeVar("T")


class StreamLoader(Loader):
    """Batches of one part of a stream, without end.

    A `TrainTransform` makes training batches. Each part continues with its next pass over the data without waiting for
    the others, so parts may have different numbers of images. An `EvalTransform` makes batches of every sample once, in
    stored order, and then batches that are `ended`; the evaluation loop stops when those of all ranks are.

    part: part of the stream that this rank reads; None for a rank without rows, which reads nothing.
    seed: seed of the order of shards and samples, and of all augmentation.
    start: global samples seen before, by a run that is resumed. The position of every part within its pass is not
        known, so reading begins with the next pass. Its order also depends on `start`, so that a run that is
        interrupted often does not see the beginning of the same pass repeatedly.
    """

    whole = False

    def __init__(
        self,
        data: StreamSet,
        transform: TrainTransform | EvalTransform,
        *,
        part: StreamPart | None = StreamPart(0, 1),
        seed: int = 0,
        start: int = 0,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(data, transform, start, **settings)
        self._data, self._part, self._endless = data, part, isinstance(transform, TrainTransform)
        self._seed = int(hash_numbers(_GOES_ON, seed, start)[0] >> np.uint64(1)) if start else seed
        assert (part is not None) == bool(len(self.rows)), f"part {part} has {len(self.rows)} rows"

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
        first = math.ceil(self.start / len(self._data))
        with closing(reader.endless(first) if self._endless else reader.once()) as samples:
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


def _ahead(items: Generator[T], stopping: threading.Event) -> Generator[T]:
    """Yield `items`, which a thread produces up to _AHEAD items ahead of the consumer to hide pauses of the network.

    Closing the iterator sets `stopping`, which must end `items`, and joins the thread.
    """
    pool = ThreadPoolExecutor(1, "vitpar-stream")
    ready = deque(pool.submit(next, items, None) for _ in range(_AHEAD))
    try:
        while (item := ready.popleft().result()) is not None:
            ready.append(pool.submit(next, items, None))
            yield item
    finally:
        stopping.set()
        pool.shutdown(cancel_futures=True)
        items.close()
