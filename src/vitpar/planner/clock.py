"""Durations of what all ranks do at the same time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from vitpar.planner.curve import Timing

SHORTEST = 1e-3  # seconds between two readings at least: what is shorter is repeated
FEWEST, MOST = 3, 25  # readings of a point


class Clock:
    """Times functions on every rank of the world at once. seconds: to spend on each, about."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self._seconds = device, seconds

    def timing(self, size: int, work: Callable[[], object]) -> Timing:
        """How long `work`, which all ranks call at once, takes the slowest of them, in the middle of several times.

        Collective. Equal on every rank.
        """
        work()
        once = self._slowest([self._read(work, 1)])[0]
        inner = max(1, math.ceil(SHORTEST / once))
        samples = min(MOST, max(FEWEST, int(self._seconds / (inner * once))))
        taken = self._slowest([self._read(work, inner) / inner for _ in range(samples)])
        low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
        return Timing(size=size, seconds=middle, spread=(high - low) / 2 / middle, samples=samples)

    def middle(self, read: Callable[[], float], samples: int = 7) -> float:
        """The median of what `read` returns on the slowest rank. Collective."""
        taken = []
        for _ in range(samples):
            self._meet()
            taken.append(read())
        return statistics.median(self._slowest(taken))

    def computed(self) -> None:
        """Wait until the device has computed what it was given; it may still be sending."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def now(self) -> float:
        """Seconds, once the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _read(self, work: Callable[[], object], times: int) -> float:
        self._meet()
        begun = self.now()
        for _ in range(times):
            work()
        return self.now() - begun

    def _meet(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def _slowest(self, seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()
