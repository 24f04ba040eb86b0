"""The deepest model that can be trained at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.peers.job import Job
from bench.peers.running import Contender, Left


def deepest(fits: Callable[[int], bool], most: int) -> int:
    """The largest depth up to `most` that fits, if all below it do; 0 for none. Doubles, then bisects."""
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
    """Two steps of a model of some depth, each trial in a process of its own.

    full: how the last one that did not fit said it. Raises Left for what is no matter of memory.
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
            # The kernel kills what takes more of the host's memory than there is.
            if left.kind not in ("full", "died"):
                raise
            self.full, self.done[depth] = left.why, False
        return self.done[depth]
