"""Threads that work ahead, such as those that read and decode batches, or beside the main one."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Thread
from typing import TypeVar

Job = TypeVar("Job")
T = TypeVar("T")
_PREFETCH = 2
"""Jobs in progress beyond the one that the consumer waits for."""


def compute_alone() -> None:
    """Let the calling thread compute without helpers: teams of several threads would take the cores from each other.

    It changes the number of threads of all that start later, too: set that again.
    """
    import torch

    torch.get_num_threads()  # otherwise the thread's first large operation sets the number again, to the program's
    torch.set_num_threads(1)


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
    pool = ThreadPoolExecutor(workers, "vitpar-ahead", initializer)

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


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread called `name`, which does not keep the process alive."""
    future = Future[T]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future
