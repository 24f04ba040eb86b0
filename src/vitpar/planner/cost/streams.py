"""Clock of one rank: computing and background transfers, which slow each other down while both are busy."""

from __future__ import annotations

from collections import defaultdict, deque

from vitpar.planner.profile.profiles import Overlap


class Transfer:
    """A background transfer.

    seconds: duration at full speed.
    across: whether it is sent over the wire to other nodes.
    after: transfer that ends before this one begins; None for none.
    """

    __slots__ = ("across", "after", "left")

    def __init__(self, seconds: float, across: bool, after: Transfer | None) -> None:
        self.left, self.across, self.after = seconds, across, after


LANES = ("shards", "replicas")
"""Communicators of background transfers: ranks that shard parameters, and ranks that hold copies of them."""


class Streams:
    """Clock of a rank: `at` holds the seconds so far, `spent` the same seconds by purpose.

    `crossing` holds those in which something is sent to other nodes. The background transfers of a lane run one after
    the other, in the order in which they were sent. Whatever is sent at the same time over one of the two wires, within
    the node or to other nodes, shares it evenly.

    overlap: factors by which computing and communication slow down while both are busy; None for 1.
    share: factor by which computing takes longer because ranks share cores.
    """

    def __init__(self, overlap: Overlap | None, share: float = 1.0) -> None:
        self._share = share
        self._compute = overlap.compute if overlap else 1.0
        self._communication = overlap.communication if overlap else 1.0
        self._queues: dict[str, deque[Transfer]] = {lane: deque() for lane in LANES}
        self._variance = 0.0
        self.at = 0.0
        self.crossing = 0.0
        self.spent: defaultdict[str, float] = defaultdict(float)

    def compute(self, seconds: float, what: str, skew: float = 0.0) -> None:
        """Compute, while background transfers progress.

        seconds: duration without transfers, on a core that is not shared.
        what: purpose to book the time under.
        skew: seconds by which the slowest rank takes longer; paid at the next `meet`.
        """
        self._variance += (skew * self._share) ** 2
        begun, seconds = self.at, seconds * self._share
        while seconds > 0 and (heads := self._heads()):
            rates = self._rates(heads, 1 / self._communication)
            took = min(seconds * self._compute, self._first(heads, rates))
            seconds -= took / self._compute
            self._advance(took, heads, rates)
        self.at += max(0.0, seconds)
        self._book(what, begun)

    def send(
        self, seconds: float, lane: str = "replicas", across: bool = False, after: Transfer | None = None
    ) -> Transfer:
        """Queue a background transfer and return it; parameters as of `Transfer`.

        lane: communicator, one of `LANES`.
        """
        job = Transfer(seconds, across, after)
        if seconds > 0:
            self._queues[lane].append(job)
        return job

    def wait(self, job: Transfer | None, what: str) -> None:
        """Wait until `job` is done, or all transfers if it is None; all of the time is booked under `what`."""
        begun = self.at
        while (job is None or job.left > 0) and (heads := self._heads()):
            rates = self._rates(heads)
            self._advance(self._first(heads, rates), heads, rates)
        self.spent[what] += self.at - begun

    def meet(self) -> None:
        """Wait for the slowest rank, by the skews since the last meeting."""
        # A different rank is slow in each layer: delays are independent, so their variances add up, not the delays.
        late = self._variance**0.5
        self._variance = 0.0
        self.at += late
        self.spent["uneven"] += late

    def block(self, seconds: float, what: str, across: bool | None = None) -> None:
        """Wait `seconds` without computing, as for a collective whose result is needed at once.

        Ranks meet first, unless `seconds` is 0.

        across: whether the wire to other nodes is used, which background transfers share. They make no progress at all
            if it is None.
        """
        if seconds > 0:
            self.meet()
        begun = self.at
        while across is not None and seconds > 0 and (heads := self._heads()):
            rates = self._rates(heads, across=across)
            speed = 1 / (1 + sum(head.across == across for head in heads))
            took = min(seconds / speed, self._first(heads, rates))
            seconds -= took * speed
            self._advance(took, heads, rates, bool(across))
        self.at += max(0.0, seconds)
        self.crossing += max(0.0, seconds) * bool(across)
        self._book(what, begun)

    def _book(self, what: str, begun: float) -> None:
        """Book the time since `begun` under a purpose."""
        self.spent[what] += self.at - begun

    @property
    def backlog(self) -> dict[tuple[str, bool], float]:
        """Seconds that the queued background transfers still take at full speed, by (lane, whether across nodes)."""
        seconds: defaultdict[tuple[str, bool], float] = defaultdict(float)
        for lane, queue in self._queues.items():
            for job in queue:
                seconds[lane, job.across] += job.left
        return dict(seconds)

    @property
    def left(self) -> float:
        """Seconds until all background transfers are done, at least: those of the wire with more of them."""
        wires = [0.0, 0.0]
        for (_, across), seconds in self.backlog.items():
            wires[across] += seconds
        return max(wires)

    def _heads(self) -> list[Transfer]:
        """Return the transfers that are being sent: the first of each lane, if what it comes after is done."""
        return [
            queue[0]
            for queue in self._queues.values()
            if queue and (queue[0].after is None or queue[0].after.left <= 0)
        ]

    def _rates(self, heads: list[Transfer], speed: float = 1.0, across: bool | None = None) -> list[float]:
        """Return the speeds of transfers that share wires with each other and with a message `across` or within."""
        if len(heads) == 1 and across is None:
            return [speed]
        busy = [head.across for head in heads] + ([] if across is None else [across])
        return [speed / busy.count(head.across) for head in heads]

    def _first(self, heads: list[Transfer], rates: list[float]) -> float:
        """Return the seconds until the first of some transfers is done."""
        return min(head.left / rate for head, rate in zip(heads, rates, strict=True))

    def _advance(self, seconds: float, heads: list[Transfer], rates: list[float], across: bool = False) -> None:
        """Let `seconds` pass, in which transfers progress; `across` as in `block`."""
        self.at += seconds
        self.crossing += seconds * (across or any(head.across for head in heads))
        for head, rate in zip(heads, rates, strict=True):
            head.left -= seconds * rate
            if head.left <= 1e-15:  # rounding can leave a residue of a finished transfer
                head.left = 0.0
        for queue in self._queues.values():
            while queue and queue[0].left <= 0:
                queue.popleft()
