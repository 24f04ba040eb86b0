"""Contenders timed side by side: taking turns, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Times:
    """Seconds of every timed step: on the clock, and of the process's CPU time (all threads)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Spread:
    """A middle and how far things lie around it: the median, and half the distance between the quartiles."""

    middle: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least two values."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (high - low) / 2)

    def text(self, digits: int) -> str:
        """`1.034 ± 0.012`."""
        return f"{self.middle:.{digits}f} ± {self.half:.{digits}f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratio of times measured in turn, pair by pair: a slow spell of the machine changes both times of a
    pair, not their ratio."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def take_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, settle: Callable[[], object] = lambda: None
) -> dict[str, Times]:
    """The times of each contender in every round, in which each runs once; the order turns around every round.

    settle: waits until the devices and the other ranks have finished; called before each reading of the clock.
    """
    times = {name: Times() for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            settle()
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            settle()
            times[name].wall.append(time.perf_counter() - wall)
            times[name].cpu.append(time.process_time() - cpu)
    return times
