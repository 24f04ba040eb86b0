"""Clock of one rank with a computing and a communication stream, which slow each other down while both are busy."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from vitpar.planner.profile.profiles import Overlap


class Spent(defaultdict[str, float]):
    """Seconds by purpose, such as "forward" or "gather"; 0 for purposes not yet seen."""

    def __init__(self, parts: Mapping[str, float] = {}) -> None:
        super().__init__(float, parts)

    def add(self, parts: Mapping[str, float], times: float = 1.0) -> None:
        """Add `times` times the seconds of `parts`."""
        for what, seconds in parts.items():
            self[what] += times * seconds


class Transfer:
    """A background transfer. `left` holds its remaining seconds, at full speed."""

    __slots__ = ("left",)

    def __init__(self, seconds: float) -> None:
        self.left = seconds


class Streams:
    """Clock of a rank: `at` holds the seconds so far, `spent` the same seconds by purpose.

    Background transfers run one after the other, in the order in which they were sent.

    overlap: factors by which computing and communication slow down while both are busy; None for 1.
    share: factor by which computing takes longer because ranks share cores.
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
        """Compute, while background transfers progress.

        seconds: duration without transfers, on a core that is not shared.
        what: purpose to book the time under.
        skew: seconds by which the slowest rank takes longer; paid at the next `meet`.
        """
        self._variance += (skew * self._share) ** 2
        begun, seconds = self.at, seconds * self._share
        while seconds > 0 and self._queue:
            job = self._queue[0]
            # Both streams are busy, each at its slower speed, for `both` seconds: until one of them has finished.
            both = min(seconds * self._compute, job.left * self._communication)
            seconds -= both / self._compute
            job.left -= both / self._communication
            self.at += both
            if job.left <= 1e-15:  # rounding can leave a residue of a finished transfer
                self._queue.popleft()
        self.at += max(0.0, seconds)
        self.spent[what] += self.at - begun

    def send(self, seconds: float) -> Transfer:
        """Queue a background transfer that takes `seconds` at full speed, and return it."""
        job = Transfer(seconds)
        if seconds > 0:
            self._queue.append(job)
        return job

    def wait(self, job: Transfer, what: str) -> None:
        """Wait until `job` and all transfers queued before it are done; all of the time is booked under `what`."""
        while job.left > 0 and self._queue:
            first = self._queue.popleft()
            self.at += first.left
            self.spent[what] += first.left
            first.left = 0.0

    def meet(self) -> None:
        """Wait for the slowest rank, by the skews since the last meeting."""
        # A different rank is slow in each layer: delays are independent, so their variances add up, not the delays.
        late = self._variance**0.5
        self._variance = 0.0
        self.at += late
        self.spent["uneven"] += late

    def block(self, seconds: float, what: str) -> None:
        """Wait `seconds` without computing, as for a collective whose result is needed at once.

        Background transfers make no progress meanwhile. Ranks meet first, unless `seconds` is 0.
        """
        if seconds > 0:
            self.meet()
        self.at += seconds
        self.spent[what] += seconds

    @property
    def left(self) -> float:
        """Return the seconds that the queued background transfers still take at full speed."""
        return sum(job.left for job in self._queue)
