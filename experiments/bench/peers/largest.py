"""Search for the deepest model that a contender can train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.peers.job import Job
from bench.peers.running import Contender, Left


def deepest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest depth up to `most` that fits, 0 for none.

    Doubles the depth, then bisects; assumes that smaller depths fit too.
    """
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


class Trials:
    """Callable that tests whether a model of a given depth can train two steps, in a separate process each time.

    full: error message of the last model that did not fit. done: whether each tested depth fits. Calling it raises
    Left for errors other than a lack of memory.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.full, self.done = replace(job, saving=True), "", dict[int, bool]()

    def __call__(self, depth: int) -> bool:
        job = replace(self._job, options={**self._job.options, "depth": depth})
        try:
            with Contender(job) as contender:
                contender.ready().turn(2)
            self.done[depth] = True
        except Left as left:
            # "died" counts as well: the kernel kills a process that exhausts the host's memory.
            if left.kind not in ("full", "died"):
                raise
            self.full, self.done[depth] = left.why, False
        return self.done[depth]
