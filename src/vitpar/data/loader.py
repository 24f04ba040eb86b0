"""Batches of one rank: the base class of all loaders, and the loaders of packed data sets.

A global batch is the same under every plan. Every rank has the labels and keys of the global batch, which come from the
index, but only the images of the rows that it requests. Ranks that need no pixels, such as the later stages of a
pipeline, request no rows and open no shard.

Samples are read, decoded and transformed in threads. Threads suffice because decoding and resizing release Python's
global interpreter lock. Every sample has its own row in the tensor of its batch and its own random numbers, so results
do not depend on which thread processes a sample, or when.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol, Required, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.cache import CachedSet
from vitpar.data.images import BadImage, BadSample, decode
from vitpar.data.randomness import Draws, SampleOrder, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.device import DrawnBatch
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError, RecipeError
from vitpar.models import IGNORED

_PREFETCH = 2  # batches in progress beyond the one that the consumer waits for
_TASK = 16  # rows of one thread-pool task: enough to amortise its overhead with tiny images, few enough to stop quickly
_NAMED = 3  # bad samples that are reported by name; the others are only counted


class Encoded(Protocol):
    """Encoded images that are read by number."""

    checked: bool
    """Whether `read` compares the bytes with a checksum."""

    def read(self, i: int) -> bytes:
        """Return the encoded image of sample `i`.

        Raises DataError, and its subclass BadImage if only that sample is damaged.
        """

    def complaint(self, i: int, error: BadImage) -> str:
        """Return a message that names sample `i` and says what is wrong with it."""


class Labelled(Encoded, Sized, Protocol):
    """Encoded images with labels."""

    labels: NDArray[np.int32]
    """Class numbers, int32 [samples]."""


@dataclass
class BatchJob:
    """Batch whose images are still to be decoded."""

    source: Encoded
    """Provider of the encoded samples."""
    samples: NDArray[np.int64]
    """Number of each sample in `source`, int64 [batch]; IGNORED for padding."""
    keys: NDArray[np.int64]
    """Random key of each sample, int64 [batch]."""
    labels: NDArray[np.int64]
    """Class numbers, int64 [batch]; IGNORED for padding and skipped samples."""
    transform: TrainTransform | EvalTransform | None = None
    """Transform of its images; None until the loader sets it."""
    images: Tensor | DrawnBatch | None = None
    """Images of this rank's rows, uint8 [rows, 3, size, size], or what their device needs to make them; None until
    they are allocated."""
    skipped: list[str] = field(default_factory=list)
    """Message for each sample that was skipped."""
    broken: list[str] = field(default_factory=list)
    """Message for each shard that was skipped from some place on."""
    ended: bool = False
    """Whether this rank's stream is exhausted."""


@dataclass(frozen=True)
class Batch:
    """Global batch, with one rank's part of the images."""

    images: Tensor | DrawnBatch | None
    """Images of this rank's rows, uint8 [rows, 3, size, size], or what their device needs to make them; None without
    rows."""
    labels: Tensor
    """Class numbers, int64 [batch]; IGNORED (-1) for padding and for samples that this rank skipped."""
    keys: Tensor
    """Random key of every (epoch, sample, repeat), int64 [batch]; 0 in evaluation.

    All random numbers of the model derive from these keys.
    """
    epoch: float
    """`samples` divided by the size of the data set."""
    samples: int
    """Global samples seen up to and including this batch, which is where the next one begins."""
    size: int
    """Side of its images, in pixels, also on ranks without rows."""
    whole: bool = True
    """Whether labels and keys cover the global batch.

    In batches of a stream they cover only the rank's own rows; the others are IGNORED and 0.
    """
    ended: bool = False
    """Whether this rank's stream is exhausted.

    Such a rank continues to yield empty batches, without end, because other ranks may have longer streams.
    """


@dataclass(frozen=True)
class Skipped:
    """Bad samples and shards that were skipped."""

    times: int = 0
    """Number of times that a sample was skipped."""
    problems: tuple[str, ...] = ()
    """Messages for at most `_NAMED` bad samples and shards, sorted."""
    shards: int = 0
    """Number of times that a streamed shard, or the rest of one, was skipped."""

    def __add__(self, other: "Skipped") -> "Skipped":
        problems = sorted({*self.problems, *other.problems})
        return Skipped(self.times + other.times, tuple(problems[:_NAMED]), self.shards + other.shards)


class LoaderSettings(TypedDict, total=False):
    """Settings of every loader."""

    batch_size: Required[int]
    """Images in the global batch."""
    rows: Sequence[int] | None
    """Rows of the global batch whose images to decode, in this order. Default: all."""
    workers: int
    """Number of decoding threads; 0 decodes in the calling thread. Affects only the speed. Default: 2."""
    bad_sample: BadSample
    """Treatment of an image that cannot be decoded. Default: "fail".

    "fail" raises DataError; "skip" leaves a zero image with label IGNORED and counts it in `skipped`. Only ranks that
    decode a sample know that it is bad.
    """
    pin_memory: bool
    """Whether to put images into pinned memory, from which copies to a GPU are asynchronous. Default: False."""
    sizes: Callable[[int], int] | None
    """Function from the samples before a batch to the side of its images, in pixels. Default: that of the transform."""


class Loader:
    """Base class of loaders, which turns the jobs that a subclass yields into batches.

    start: global samples seen before the first batch; every `iter()` begins there again.

    The attribute `skipped` counts the bad samples and shards skipped so far.

    Raises DataError for a batch size below 1, and RecipeError for another invalid setting.
    """

    whole = True
    """Whether labels and keys of the batches cover the global batch."""

    def __init__(
        self, data: Sized, transform: TrainTransform | EvalTransform, start: int = 0, **settings: Unpack[LoaderSettings]
    ) -> None:
        self.workers, self.bad_sample = settings.get("workers", 2), settings.get("bad_sample", "fail")
        if self.workers < 0:
            raise RecipeError(f"workers is {self.workers}: use 0 to decode in the main thread, or a positive number")
        if self.bad_sample not in ("fail", "skip"):
            raise RecipeError(f"bad_sample is '{self.bad_sample}': use fail or skip")
        self.batch_size, rows = settings["batch_size"], settings.get("rows")
        if self.batch_size < 1:
            raise DataError(f"the batch size is {self.batch_size}: use 1 or more")
        self.rows = np.arange(self.batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
        inside = (self.rows >= 0) & (self.rows < self.batch_size)
        assert inside.all(), f"rows {rows} are not all within a batch of {self.batch_size}"
        self.start = start
        self.skipped = Skipped()
        self._cache: CachedSet | None = None
        self._size, self._pin_memory = len(data), settings.get("pin_memory", False)
        self._transform, self._sizes = transform, settings.get("sizes")

    def _jobs(self) -> Generator[BatchJob]:
        """Yield the batches to fill, in order."""
        raise NotImplementedError

    def __iter__(self) -> Generator[Batch]:
        with closing(self._jobs()) as jobs, closing(self._filled(self._with_transforms(jobs))) as filled:
            for number, job in enumerate(filled, start=1):
                assert job.transform is not None
                samples = self.start + number * self.batch_size
                labels, keys, epoch = torch.from_numpy(job.labels), torch.from_numpy(job.keys), samples / self._size
                yield Batch(job.images, labels, keys, epoch, samples, job.transform.size, self.whole, job.ended)

    def _with_transforms(self, jobs: Generator[BatchJob]) -> Generator[BatchJob]:
        """Yield the jobs with their transforms."""
        for number, job in enumerate(jobs):
            size = self._sizes(self.start + number * self.batch_size) if self._sizes else self._transform.size
            if size != self._transform.size:
                self._transform = replace(self._transform, size=size)
            job.transform = self._transform
            yield job

    def _filled(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        """Yield the jobs in order, with decoded images; skipped rows get label IGNORED.

        Closing the iterator ends the threads.
        """
        if not len(self.rows):
            yield from jobs
            return
        with closing(self._threaded(jobs) if self.workers else self._inline(jobs)) as filled:
            for job in filled:
                problems = tuple(job.skipped + job.broken)
                self.skipped += Skipped(len(job.skipped), problems, len(job.broken))
                yield job

    def _inline(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        for job in jobs:
            self._allocate(job)
            self._fill(job, 0, len(self.rows))
            yield job

    def _threaded(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        waiting: deque[tuple[BatchJob, list[Future[None]]]] = deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="vitpar-decode", initializer=self._start_thread)
        try:
            for job in jobs:
                waiting.append((job, self._submit(pool, job)))
                if len(waiting) > _PREFETCH:
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _start_thread(self) -> None:
        """Prepare a new thread of the pool."""

    def _submit(self, pool: ThreadPoolExecutor, job: BatchJob) -> list[Future[None]]:
        self._allocate(job)
        rows = len(self.rows)
        task = self._task_rows(rows)
        return [pool.submit(self._fill, job, row, min(row + task, rows)) for row in range(0, rows, task)]

    def _task_rows(self, rows: int) -> int:
        """Return the most rows of a task for a batch of which this rank has `rows`."""
        return min(_TASK, -(-rows // self.workers))

    def _allocate(self, job: BatchJob) -> None:
        assert job.transform is not None
        size = job.transform.size
        job.images = torch.zeros(len(self.rows), 3, size, size, dtype=torch.uint8, pin_memory=self._pin_memory)

    def _fill(self, job: BatchJob, start: int, stop: int) -> None:
        """Decode the images at places `start` to `stop` - 1 of this rank's rows."""
        assert isinstance(job.images, Tensor) and job.transform is not None
        pixels = job.images.numpy()
        for place in range(start, stop):
            row = self.rows[place]
            sample = int(job.samples[row])
            if sample == IGNORED:
                continue
            try:
                image = self._decoded(job.source, sample)
                pixels[place] = _transformed(job.transform, image, int(job.keys[row])).numpy()
            except BadImage as error:
                problem = job.source.complaint(sample, error)
                if self.bad_sample == "fail":
                    raise DataError(f"{problem}; replace it, or set data.bad_sample to skip") from error
                job.labels[row] = IGNORED
                job.skipped.append(problem)

    def _decoded(self, source: Encoded, sample: int) -> NDArray[np.uint8]:
        """Return the decoded image, uint8 [height, width, 3]. No transform writes to it, since it may be cached."""
        image = self._cache.get(sample) if self._cache else None
        if image is None:
            image = decode(source.read(sample), strict=not source.checked)
            if self._cache:
                self._cache.put(sample, image)
        return image


def _transformed(transform: TrainTransform | EvalTransform, image: NDArray[np.uint8], key: int) -> Tensor:
    return transform(image, Draws(key)) if isinstance(transform, TrainTransform) else transform(image)


def _finished(job: BatchJob, tasks: list[Future[None]]) -> BatchJob:
    for task in tasks:
        task.result()
    return job


class TrainLoader(Loader):
    """Endless training batches of a packed data set.

    order: order of all samples of `shards`.
    start: global samples seen before the first batch.
    cache: decoded images of `shards`, which loaders share. It changes only the speed.

    A skipped bad sample is IGNORED only on ranks that decode it; other ranks keep its label.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform,
        *,
        order: SampleOrder,
        start: int = 0,
        cache: CachedSet | None = None,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        assert order.size == len(shards), f"an order of {order.size} samples for {len(shards)}"
        super().__init__(shards, transform, start, **settings)
        self._shards, self._order, self._cache = shards, order, cache

    def _jobs(self) -> Generator[BatchJob]:
        checked = -1
        for start in itertools.count(self.start, self.batch_size):
            epochs, samples, repeats = self._order.batch(start, self.batch_size)
            if len(self.rows) and epochs[-1] > checked:
                self._shards.refuse_changed()
                checked = int(epochs[-1])
            keys = sample_keys(self._order.seed, epochs, samples, repeats)
            yield BatchJob(self._shards, samples, keys, self._shards.labels[samples].astype(np.int64))


class EvalLoader(Loader):
    """Every sample of a split once, in order, in `len()` batches of the same shape.

    The last batch is padded with label IGNORED. Every rank yields the same number of batches; the rows of a rank may
    be only padding.

    cache: decoded images of `images`, which loaders share. It changes only the speed.
    """

    def __init__(
        self,
        images: Labelled,
        transform: EvalTransform,
        *,
        cache: CachedSet | None = None,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(images, transform, **settings)
        self._images, self._cache = images, cache

    def __len__(self) -> int:
        return -(-len(self._images) // self.batch_size)

    def _jobs(self) -> Generator[BatchJob]:
        for step in range(len(self)):
            samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
            real = samples < len(self._images)
            labels = np.full(len(samples), IGNORED, dtype=np.int64)
            labels[real] = self._images.labels[samples[real]]
            yield BatchJob(self._images, np.where(real, samples, IGNORED), np.zeros_like(samples), labels)
