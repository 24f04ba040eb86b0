"""Two streams of a rank, computing and communication, that slow each other down while they overlap."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from vitpar.planner.profile.profiles import Overlap


class Spent(defaultdict[str, float]):
    """Seconds by what for."""

    def __init__(self, parts: Mapping[str, float] = {}) -> None:
        super().__init__(float, parts)

    def add(self, parts: Mapping[str, float], times: float = 1.0) -> None:
        """More of it, `times` over."""
        for what, seconds in parts.items():
            self[what] += times * seconds


class Transfer:
    """Something to be sent in the background. left: seconds, were it alone."""

    __slots__ = ("left",)

    def __init__(self, seconds: float) -> None:
        self.left = seconds


class Streams:
    """A clock that goes on while a rank computes and waits. What is sent in the background goes in order.

    overlap: how much slower both are at the same time; None for not at all. share: how many ranks take turns on a core,
    for what is computed. at: seconds so far. spent: the same by what for.
    """

    def __init__(self, overlap: Overlap | None, share: float = 1.0) -> None:
        self._share = share
        self._compute = overlap.compute if overlap else 1.0
        self._communication = overlap.communication if overlap else 1.0
        self._queue: deque[Transfer] = deque()
        self._variance = 0.0
        self.at = 0.0
        self.spent = Spent()

    def compute(self, seconds: float, what: str, skew: float = 0.0) -> None:
        """Compute for so long, were nothing sent meanwhile. skew: seconds by which the slowest rank takes longer."""
        self._variance += (skew * self._share) ** 2
        begun, seconds = self.at, seconds * self._share
        while seconds > 0 and self._queue:
            job = self._queue[0]
            both = min(seconds * self._compute, job.left * self._communication)
            seconds -= both / self._compute
            job.left -= both / self._communication
            self.at += both
            if job.left <= 1e-15:
                self._queue.popleft()
        self.at += max(0.0, seconds)
        self.spent[what] += self.at - begun

    def send(self, seconds: float) -> Transfer:
        """Send in the background what takes so long alone."""
        job = Transfer(seconds)
        if seconds > 0:
            self._queue.append(job)
        return job

    def wait(self, job: Transfer, what: str) -> None:
        """Until it is sent, with all before it."""
        while job.left > 0 and self._queue:
            first = self._queue.popleft()
            self.at += first.left
            self.spent[what] += first.left
            first.left = 0.0

    def meet(self) -> None:
        """Wait for the slowest rank. Which rank is slow changes from layer to layer, so that over many layers they
        differ as independent random numbers do."""
        late = self._variance**0.5
        self._variance = 0.0
        self.at += late
        self.spent["uneven"] += late

    def block(self, seconds: float, what: str) -> None:
        """Do nothing else for so long, as in a collective whose result is needed at once."""
        if seconds > 0:
            self.meet()
        self.at += seconds
        self.spent[what] += seconds

    @property
    def left(self) -> float:
        """Seconds until all is sent that was given to the background."""
        return sum(job.left for job in self._queue)
