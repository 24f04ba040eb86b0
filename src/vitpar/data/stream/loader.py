"""One rank's batches of a stream.

Each rank that decodes images reads shards of its own, so only it knows which samples they hold: a batch has the labels
and keys of its own rows, and whoever trains brings them together. Every rank has as many batches as every other.
"""

import math
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vitpar.data.decoding import BadSample, Decoder, Job, Skipped
from vitpar.data.loader import Batch, EvalBatch, chosen_rows
from vitpar.data.randomness import Draws, hash_numbers
from vitpar.data.stream.stream_set import Fetched, Part, Reader, Sample, StreamSet
from vitpar.data.transforms import EvalTransform, TrainTransform
from vitpar.models import IGNORED

_AHEAD = 2  # batches that are fetched beyond those that are being decoded
_GOES_ON = 0x60E5  # sets the seeds of runs that go on apart from other hashes of their seed
T = TypeVar("T")


class _Streamed:
    """What loaders of streams have in common.

    rows: which images of a batch to give, in this order (None: all). part: who reads here, None for a rank that reads
    nothing and has no rows. workers: decoding threads, and with any of them one that reads ahead; 0 for none.
    """

    def __init__(
        self,
        data: StreamSet,
        decoder: Decoder,
        *,
        batch_size: int,
        rows: Sequence[int] | None,
        part: Part | None,
        seed: int,
    ) -> None:
        self.data, self.batch_size, self._decoder, self._part, self._seed = data, batch_size, decoder, part, seed
        self._rows = chosen_rows(batch_size, rows)
        assert (part is not None) == bool(len(self._rows)), f"part {part} has {len(self._rows)} rows"

    @property
    def skipped(self) -> Skipped:
        """What was bad and passed over so far."""
        return self._decoder.skipped

    def _filled(self, samples_of: Callable[[Reader], Generator[Sample]]) -> Generator[Job]:
        """The batches that the rows of this rank make of its samples; the last one perhaps not full."""
        assert self._part is not None
        stopping = threading.Event()
        bad_sample = self._decoder.bad_sample
        reader = Reader(self.data, self._part, self._seed, bad_sample=bad_sample, stopping=stopping)
        jobs = self._jobs(reader, samples_of(reader))
        ready = _ahead(jobs, stopping) if self._decoder.workers else jobs
        with closing(ready), closing(self._decoder.fill(ready)) as filled:
            yield from filled

    def _jobs(self, reader: Reader, samples: Generator[Sample]) -> Generator[Job]:
        with closing(samples):
            while True:
                taken = list(islice(samples, len(self._rows)))
                if not taken and not reader.skipped and not reader.broken:
                    return
                yield self._job(taken, reader)

    def _job(self, taken: Sequence[Sample], reader: Reader) -> Job:
        numbers, labels = np.full((2, self.batch_size), IGNORED, dtype=np.int64)
        keys = np.zeros(self.batch_size, np.int64)
        used = self._rows[: len(taken)]
        numbers[used], labels[used] = np.arange(len(taken)), [sample.label for sample in taken]
        keys[used] = [sample.key for sample in taken]
        job = Job(Fetched(taken), numbers, keys, labels, self._rows, skipped=reader.skipped, broken=reader.broken)
        reader.skipped, reader.broken = [], []
        return job

    def _nothing(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels and keys of a batch of which there is nothing here."""
        return np.full(self.batch_size, IGNORED, dtype=np.int64), np.zeros(self.batch_size, np.int64)


class StreamLoader(_Streamed):
    """Endless training batches. Each part goes on into its next pass over the data without waiting for the others, so
    their number does not depend on how many images a shard has.

    start: global samples seen before, by a run that goes on: reading begins with the pass after that which they end in,
    because where every part was in it is not known, and in an order of its own, so that a run that is stopped often
    does not see the beginning of one pass again and again. seed: of the order of shards and samples and of all
    augmentation. part: see `Part`; None for a rank without rows. The other settings are those of `TrainLoader`.

    Raises DataError for a batch of no images, RecipeError for a wrong setting.
    """

    def __init__(
        self,
        data: StreamSet,
        transform: TrainTransform,
        *,
        seed: int,
        batch_size: int,
        rows: Sequence[int] | None = None,
        part: Part | None = Part(0, 1),
        workers: int = 2,
        bad_sample: BadSample = "fail",
        pin_memory: bool = False,
        start: int = 0,
    ) -> None:
        decoder = Decoder(
            lambda image, key: transform(image, Draws(key)),
            transform.size,
            workers=workers,
            bad_sample=bad_sample,
            pin_memory=pin_memory,
        )
        own = int(hash_numbers(_GOES_ON, seed, start)[0] >> np.uint64(1)) if start else seed
        super().__init__(data, decoder, batch_size=batch_size, rows=rows, part=part, seed=own)
        self.start = start

    def __iter__(self) -> Generator[Batch]:
        samples, first = self.start, math.ceil(self.start / len(self.data))
        jobs = self._filled(lambda reader: reader.endless(first)) if self._part else self._others()
        with closing(jobs):
            for job in jobs:
                samples += self.batch_size
                labels, keys = torch.from_numpy(job.labels), torch.from_numpy(job.keys)
                yield Batch(job.images, labels, keys, samples / len(self.data), samples, whole=False)

    def _others(self) -> Generator[Job]:
        while True:
            labels, keys = self._nothing()
            yield Job(Fetched(()), labels, keys, labels, self._rows)


class StreamEvalLoader(_Streamed):
    """Every sample of a stream once, in the order in which it is stored; then batches that are `ended`, without end.

    Who evaluates stops when all ranks have ended. Settings as those of `StreamLoader`; no part needs to have a shard.
    """

    def __init__(
        self,
        data: StreamSet,
        transform: EvalTransform,
        *,
        batch_size: int,
        rows: Sequence[int] | None = None,
        part: Part | None = Part(0, 1),
        workers: int = 2,
        bad_sample: BadSample = "fail",
        pin_memory: bool = False,
    ) -> None:
        decoder = Decoder(
            lambda image, key: transform(image),
            transform.size,
            workers=workers,
            bad_sample=bad_sample,
            pin_memory=pin_memory,
        )
        super().__init__(data, decoder, batch_size=batch_size, rows=rows, part=part, seed=0)

    def __iter__(self) -> Generator[EvalBatch]:
        if self._part is not None:
            with closing(self._filled(Reader.once)) as jobs:
                for job in jobs:
                    yield EvalBatch(job.images, torch.from_numpy(job.labels), whole=False)
        size = self._decoder.size
        images = torch.zeros(len(self._rows), 3, size, size, dtype=torch.uint8) if len(self._rows) else None
        while True:
            yield EvalBatch(images, torch.from_numpy(self._nothing()[0]), whole=False, ended=True)


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
