"""Fills batches with pixels: reads, decodes and transforms samples in threads, and hands the batches over in order.

Threads suffice because decoding and resizing run outside Python's global lock. Every sample has its own row of its
batch's tensor and randomness of its own, so no result depends on which thread did it or when.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.images import BadImage, decode
from vitpar.errors import DataError, RecipeError
from vitpar.models import IGNORED

BadSample = Literal["fail", "skip"]

_PREFETCH = 2  # batches in work beyond the one being waited for
_TASK = 16  # rows a thread takes at a time: enough to hide the hand-over of tiny images, few enough to stop quickly
_NAMED = 3  # bad samples that are named; the others are only counted


class Encoded(Protocol):
    """Encoded images by number. checked: whether `read` compares them with a checksum."""

    checked: bool

    def read(self, i: int) -> bytes:
        """Return the encoded image of sample `i`. Raises DataError, and BadImage where that sample is damaged."""

    def complaint(self, i: int, error: BadImage) -> str:
        """Name sample `i`, with what is wrong with it."""


@dataclass
class Job:
    """One batch to fill.

    source: has the samples. samples: int64 [batch], IGNORED for padding. keys, labels: int64 [batch]. rows: int64,
    which of them to decode. images: uint8 [rows, 3, size, size]. skipped: what was wrong with each sample that was
    skipped. broken: what was wrong with each shard, of which what had not come was skipped.
    """

    source: Encoded
    samples: NDArray[np.int64]
    keys: NDArray[np.int64]
    labels: NDArray[np.int64]
    rows: NDArray[np.int64]
    images: Tensor | None = None
    skipped: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Skipped:
    """What was bad and passed over. times: how often a sample was. problems: which ones and what is wrong, the first
    few. shards: how often a streamed shard, or what was left of one, was."""

    times: int = 0
    problems: tuple[str, ...] = ()
    shards: int = 0

    def __add__(self, other: "Skipped") -> "Skipped":
        problems = sorted({*self.problems, *other.problems})
        return Skipped(self.times + other.times, tuple(problems[:_NAMED]), self.shards + other.shards)


class Decoder:
    """Fills jobs.

    apply: from the decoded uint8 [height, width, 3] and the sample's key to uint8 [3, size, size]. workers: threads,
    0 to decode in the caller's own. bad_sample: what an image that cannot be decoded does: "fail" raises DataError,
    "skip" leaves a zero image with label IGNORED and counts it in `skipped`. pin_memory: whether batches are in memory
    that a GPU copies from by itself.
    """

    def __init__(
        self,
        apply: Callable[[NDArray[np.uint8], int], Tensor],
        size: int,
        *,
        workers: int,
        bad_sample: BadSample,
        pin_memory: bool = False,
    ) -> None:
        if workers < 0:
            raise RecipeError(f"{workers} decoding workers: give 0 to decode in the main thread, or a positive number")
        if bad_sample not in ("fail", "skip"):
            raise RecipeError(f"unknown way '{bad_sample}' to treat a bad sample: use fail or skip")
        self.apply = apply
        self.size = size
        self.workers = workers
        self.bad_sample = bad_sample
        self.pin_memory = pin_memory
        self.skipped = Skipped()

    def fill(self, jobs: Iterable[Job]) -> Generator[Job]:
        """The jobs in order, filled; a skipped row has label IGNORED. Closing the iterator ends the threads."""
        with closing(self._threaded(jobs) if self.workers else self._inline(jobs)) as filled:
            for job in filled:
                problems = tuple(job.skipped + job.broken)
                self.skipped = self.skipped + Skipped(len(job.skipped), problems, len(job.broken))
                yield job

    def _inline(self, jobs: Iterable[Job]) -> Generator[Job]:
        for job in jobs:
            self._allocate(job)
            self._fill_rows(job, 0, len(job.rows))
            yield job

    def _threaded(self, jobs: Iterable[Job]) -> Generator[Job]:
        waiting: deque[tuple[Job, list[Future[None]]]] = deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="vitpar-decode")
        try:
            for job in jobs:
                waiting.append((job, self._submit(pool, job)))
                if len(waiting) > _PREFETCH:
                    yield _finished(*waiting.popleft())
            while waiting:
                yield _finished(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, job: Job) -> list[Future[None]]:
        self._allocate(job)
        rows = len(job.rows)
        task = min(_TASK, -(-rows // self.workers))
        return [pool.submit(self._fill_rows, job, row, min(row + task, rows)) for row in range(0, rows, task)]

    def _allocate(self, job: Job) -> None:
        shape = (len(job.rows), 3, self.size, self.size)
        job.images = torch.zeros(shape, dtype=torch.uint8, pin_memory=self.pin_memory)

    def _fill_rows(self, job: Job, start: int, stop: int) -> None:
        assert job.images is not None
        pixels = job.images.numpy()
        for place in range(start, stop):
            row = job.rows[place]
            sample = int(job.samples[row])
            if sample == IGNORED:
                continue
            try:
                image = decode(job.source.read(sample), strict=not job.source.checked)
                pixels[place] = self.apply(image, int(job.keys[row])).numpy()
            except BadImage as error:
                problem = job.source.complaint(sample, error)
                if self.bad_sample == "fail":
                    raise DataError(f"{problem}; replace it, or skip such with data.bad_sample") from error
                job.labels[row] = IGNORED
                job.skipped.append(problem)


def _finished(job: Job, tasks: list[Future[None]]) -> Job:
    for task in tasks:
        task.result()
    return job
