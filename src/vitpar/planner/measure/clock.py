"""Durations of what several processes do at the same time."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from vitpar.planner.profile.curve import Timing

SHORTEST = 1e-3  # seconds between two readings at least: what is shorter is repeated
FEWEST, MOST = 3, 25  # readings of a point


class Together(Protocol):
    """The processes that measure at the same time."""

    def meet(self) -> None:
        """Wait for the others."""

    def slowest(self, seconds: list[float]) -> list[float]:
        """The largest of all processes, one by one; equal for all."""


class Group:
    """The ranks of the world."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def meet(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def slowest(self, seconds: list[float]) -> list[float]:
        found = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()


class Neighbours:
    """Processes that share a machine and nothing else: each may pretend to be in a world of its own."""

    def __init__(self, rank: int, size: int, store: dist.Store | None) -> None:
        self.rank, self._size, self._store, self._round = rank, size, store, 0

    def meet(self) -> None:
        self.slowest([])

    def slowest(self, seconds: list[float]) -> list[float]:
        if self._store is None:
            return seconds
        self._round += 1
        keys = [f"vitpar/{self._round}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self.rank], json.dumps(seconds))
        every = [json.loads(self._store.get(key)) for key in keys]
        return [max(values) for values in zip(*every, strict=True)]


class Clock:
    """Times functions that all of `together` call at once. seconds: to spend on each point, about."""

    def __init__(self, device: torch.device, together: Together, seconds: float) -> None:
        self.device, self._together, self._seconds = device, together, seconds

    def timing(self, size: int, work: Callable[[], object]) -> Timing:
        """How long `work` takes the slowest, in the middle of several times. Collective; equal for all."""
        return self.timings(size, work)[0]

    def timings(self, size: int, *phases: Callable[[], object]) -> tuple[Timing, ...]:
        """The same of several functions that follow each other, such as forward and backward."""
        for phase in phases:
            phase()
        once = self._together.slowest(self._read(phases, 1))
        inner = max(1, math.ceil(SHORTEST / min(once)))
        samples = min(MOST, max(FEWEST, int(self._seconds / (inner * sum(once)))))
        readings = []
        for _ in range(samples):
            self._together.meet()
            readings += [seconds / inner for seconds in self._read(phases, inner)]
        slowest = self._together.slowest(readings)
        return tuple(_timing(size, slowest[number :: len(phases)]) for number in range(len(phases)))

    def middle(self, read: Callable[[], float], samples: int = 7) -> float:
        """The median of what `read` returns to the slowest. Collective."""
        taken = []
        for _ in range(samples):
            self._together.meet()
            taken.append(read())
        return statistics.median(self._together.slowest(taken))

    def computed(self) -> None:
        """Wait until the device has computed what it was given; it may still be sending."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _read(self, phases: tuple[Callable[[], object], ...], times: int) -> list[float]:
        """Seconds that each phase takes `times` times."""
        taken = []
        for phase in phases:
            begun = self._now()
            for _ in range(times):
                phase()
            taken.append(self._now() - begun)
        return taken

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _timing(size: int, seconds: list[float]) -> Timing:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(size=size, seconds=middle, spread=(high - low) / 2 / middle, samples=len(seconds))
