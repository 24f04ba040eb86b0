"""Timing of contenders that take turns, so that other work on the machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Times:
    """Seconds of every timed step of one contender."""

    wall: list[float] = field(default_factory=list)
    """Wall-clock time."""
    cpu: list[float] = field(default_factory=list)
    """CPU time of the process, all threads together."""


@dataclass(frozen=True)
class Spread:
    """Median and spread of measurements."""

    middle: float
    """Median."""
    half: float
    """Half the interquartile range."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least two values."""
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, (high - low) / 2)

    def text(self, digits: int) -> str:
        """Return text such as `1.034 ± 0.012`, with `digits` decimals."""
        return f"{self.middle:.{digits}f} ± {self.half:.{digits}f}"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the spread of the ratios `ours / theirs` of times that were measured in turn.

    The ratio is taken pair by pair: a slow spell of the machine changes both times of a pair, not their ratio.
    """
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def take_turns(
    contenders: Mapping[str, Callable[[], object]], rounds: int, settle: Callable[[], object] = lambda: None
) -> dict[str, Times]:
    """Run each contender once per round and return its times; the order is reversed every other round.

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
