"""Samples of each batch of a packed data set, and threads that work for batches, for images and text alike."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError, RecipeError
from vitpar.models.config import IGNORED

_PREFETCH = 2  # batches in progress beyond the one that the consumer waits for
Numbers = NDArray[np.int64]
Job = TypeVar("Job")


def refuse_settings(batch_size: int, workers: int) -> None:
    """Raise DataError for a batch size below 1, and RecipeError for a negative number of threads."""
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}: use 1 or more")
    if workers < 0:
        raise RecipeError(f"workers is {workers}: use 0 to work in the main thread, or a positive number")


def shuffled_places(
    data: ShardSet, order: SampleOrder, start: int, batch_size: int, *, reads: bool = True
) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the numbers and random keys of the samples of each training batch, int64 [batch] both, without end.

    start: global samples seen before the first batch.
    reads: whether samples are read. Then each epoch begins by asking whether a shard was replaced.
    """
    assert order.size == len(data), f"an order of {order.size} samples for {len(data)}"
    checked = -1
    for first in itertools.count(start, batch_size):
        epochs, samples, repeats = order.batch(first, batch_size)
        if reads and epochs[-1] > checked:
            data.refuse_changed()
            checked = int(epochs[-1])
        yield samples, sample_keys(order.seed, epochs, samples, repeats)


def places_in_turn(size: int, batch_size: int) -> Iterator[Numbers]:
    """Yield the numbers of the samples of each batch, int64 [batch], all once; IGNORED pads the last batch."""
    for first in range(0, size, batch_size):
        samples = np.arange(first, first + batch_size)
        yield np.where(samples < size, samples, IGNORED)


def in_threads(
    jobs: Iterable[Job],
    tasks: Callable[[Job], list[Callable[[], None]]],
    workers: int,
    initializer: Callable[[], None] | None = None,
) -> Generator[Job]:
    """Yield jobs in order, each when its tasks are done. Closing the iterator ends the threads.

    tasks: returns the calls that complete a job, in any order.
    workers: number of threads; 0 works in the calling one.
    initializer: called once in each thread.
    """
    if not workers:
        for job in jobs:
            for task in tasks(job):
                task()
            yield job
        return
    waiting: deque[tuple[Job, list[Future[None]]]] = deque()
    pool = ThreadPoolExecutor(workers, "vitpar-decode", initializer)

    def finished() -> Job:
        job, futures = waiting.popleft()
        for future in futures:
            future.result()
        return job

    try:
        for job in jobs:
            waiting.append((job, [pool.submit(task) for task in tasks(job)]))
            if len(waiting) > _PREFETCH:
                yield finished()
        while waiting:
            yield finished()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
