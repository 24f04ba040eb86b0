"""Durations of what several processes do at the same time, as if their cores were always equally fast.

On a machine whose cores others use too, the same instructions take up to twice as long as a second ago, and plans that
are measured minutes after a profile meet another machine. So everything that is timed on a CPU is timed beside a fixed
piece of work (`CpuSpeedProbe`), and given as if that had always taken equally long.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
import torch.distributed as dist
from torch import nn

from vitpar.launch.resources import cpu_cores
from vitpar.launch.world_group import all_reduce_, barrier
from vitpar.planner.profile.profiles import Timing

SHORTEST = 1e-3  # seconds between two readings at least: what is shorter is repeated
FEWEST, MOST = 5, 25  # readings of a point, or of what is repeated three readings
PACES = 25  # readings of the pace at first
Progress = Callable[[int, int, str], None]
"""Called with (points done, points in all, what is measured next)."""


class CpuSpeedProbe:
    """An MLP, forward and backward, that fits into no core's own caches: slowed down by what slows down a ViT's layers,
    as products alone are not."""

    def __init__(self, rows: int = 512, width: int = 128) -> None:
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self._mlp, self._x = nn.Sequential(*layers), torch.ones(rows, width)
        self._parameters = tuple(self._mlp.parameters())

    def read(self) -> float:
        """Seconds of a core that the work takes, some thousandths: not those in which our other processes have it."""
        begun = time.thread_time()
        torch.autograd.grad(self._mlp(self._x).sum(), self._parameters)
        return time.thread_time() - begun


STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a core in `STAT` in which it worked for somebody: user, nice, system, interrupts, and steal, which other
virtual machines took. Source: proc_stat(5)."""


@dataclass(frozen=True)
class CoreUse:
    """CPU seconds so far, on the cores that this process may run on."""

    busy: float
    """CPU seconds of all programs, other virtual machines included."""
    own: float
    """CPU seconds of this process."""
    capacity: float
    """CPU seconds that the cores could have given, from an arbitrary start."""

    @classmethod
    def read(cls, stat: Path = STAT) -> Self | None:
        """The use by now; None where the system does not tell."""
        try:
            lines = [line.split() for line in stat.read_text().splitlines()]
            cores = [f"cpu{number}" for number in os.sched_getaffinity(0)]
            ticks = [int(line[1 + column]) for line in lines if line and line[0] in cores for column in BUSY]
        except (OSError, AttributeError, ValueError, IndexError):
            return None
        if not any(ticks):  # sandboxes show zeros
            return None
        return cls(sum(ticks) / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic() * len(cores))

    def since(self, before: Self) -> tuple[float, float, float]:
        """Seconds after `before`: of all programs, of this process, and of the cores together."""
        return self.busy - before.busy, self.own - before.own, self.capacity - before.capacity


def others_share(ranks: Iterable[tuple[str, float, float, float]]) -> float | None:
    """The share of the cores, 0 to 1, that programs other than the ranks used, on the machine where it was most.

    ranks: the machine of each rank and what `CoreUse.since` returned there. None where they took less than a few ticks
    of the system's clock.
    """
    machines: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for machine, *times in ranks:
        machines[machine].append((times[0], times[1], times[2]))
    shares = []
    for each in machines.values():
        busy, capacity = max(times[0] for times in each), max(times[2] for times in each)
        if capacity > 0.2:
            shares.append(min(1.0, max(0.0, (busy - sum(times[1] for times in each)) / capacity)))
    return max(shares, default=None)


def load_share() -> float | None:
    """The share of the cores that programs used in the last minute, by the load average; for systems without `STAT`."""
    try:
        return min(1.0, os.getloadavg()[0] / cpu_cores())
    except (OSError, AttributeError):
        return None


class ClockedRanks:
    """The ranks of the world. The slowest counts: what they do together ends when it has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def meet(self) -> None:
        """Wait for the others."""
        if dist.get_world_size() > 1:
            barrier()

    def agree(self, seconds: list[float]) -> tuple[list[float], list[float]]:
        """Return the figures that count over all processes, one by one, and by how much the slowest exceeded them;
        equal on all ranks."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        all_reduce_(found, dist.ReduceOp.MAX)
        return found.tolist(), [0.0] * len(seconds)

    def mean(self, seconds: list[float]) -> list[float]:
        """The mean of all processes' figures, one by one; equal for all."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        all_reduce_(found)
        return (found / dist.get_world_size()).tolist()


class Neighbours:
    """Processes that share a machine but no process group: each may run in a world of its own.

    The mean counts, since layers do not wait for other ranks; where something does, it waits for the slowest. Methods
    are those of `ClockedRanks`.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None) -> None:
        self.rank, self._size, self._store, self._round = rank, size, store, 0

    def meet(self) -> None:
        self.agree([])

    def agree(self, seconds: list[float]) -> tuple[list[float], list[float]]:
        if self._store is None:
            return seconds, [0.0] * len(seconds)
        self._round += 1
        keys = [f"vitpar/{self._round}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self.rank], json.dumps(seconds))
        every = [json.loads(self._store.get(key)) for key in keys]
        columns = list(zip(*every, strict=True))
        means = [statistics.fmean(values) for values in columns]
        return means, [max(values) - mean for values, mean in zip(columns, means, strict=True)]

    def mean(self, seconds: list[float]) -> list[float]:
        return self.agree(seconds)[0]


class Clock:
    """Times functions that all of `together` call at once. seconds: to spend on each point, about."""

    def __init__(self, device: torch.device, together: ClockedRanks | Neighbours, seconds: float) -> None:
        self.device, self._together, self._seconds = device, together, seconds
        self._work = CpuSpeedProbe() if device.type == "cpu" else None
        self._paces: list[float] = []

    @cached_property
    def pace(self) -> float:
        """Seconds of `CpuSpeedProbe` in all that is timed; 0 on GPUs. Collective on first use."""
        return statistics.fmean(self._together.mean([self._paced() for _ in range(PACES)]))

    @property
    def usual(self) -> float:
        """Mean seconds of the speed probe over all measurements so far."""
        return statistics.fmean(self._paces)

    def timing(self, size: int, work: Callable[[], object]) -> Timing:
        """How long `work` takes, in the middle of several times. Collective; equal for all."""
        return self.timings(size, work)[0]

    def timings(self, size: int, *phases: Callable[[], object]) -> tuple[Timing, ...]:
        """Return the timings of several functions that run one after the other, such as forward and backward."""
        for phase in phases:
            phase()
        once, _ = self._together.agree(self._read(phases, 1))
        inner = max(1, math.ceil(SHORTEST / min(once)))
        samples = min(MOST, max(FEWEST if inner == 1 else 3, int(self._seconds / (inner * sum(once)))))
        readings = self._readings(samples, lambda: self._read(phases, inner))
        agreed, more = ([seconds / inner for row in rows for seconds in row] for rows in readings)
        each = len(phases)
        return tuple(_timing(size, agreed[n::each], statistics.median(more[n::each])) for n in range(each))

    def middle(self, read: Callable[[], float], samples: int = 7) -> float:
        """The median of what `read` returns. Collective."""
        return statistics.median(row[0] for row in self._readings(samples, lambda: [read()])[0])

    def computed(self) -> None:
        """Wait until the device has computed what it was given; it may still be sending."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _readings(self, samples: int, read: Callable[[], list[float]]) -> tuple[list[list[float]], list[list[float]]]:
        """Return the seconds that count over all processes and how much more the slowest took, both scaled to our speed
        probe."""
        pace, rows, paces = self.pace, [], [self._paced()]
        for _ in range(samples):
            self._together.meet()
            rows.append(read())
            paces.append(self._paced())
        found = self._together.agree([seconds for row in rows for seconds in row])
        paces = self._together.mean(paces)
        self._paces += paces
        factors = [2 * pace / (before + after) if pace else 1.0 for before, after in pairwise(paces)]
        each = len(rows[0])
        agreed, more = (
            [[factor * s for s in values[n * each : (n + 1) * each]] for n, factor in enumerate(factors)]
            for values in found
        )
        return agreed, more

    def _paced(self) -> float:
        if self._work is None:
            return 0.0
        self._together.meet()  # or who is done would take the core from who is not
        return self._work.read()

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


def _timing(size: int, seconds: list[float], skew: float) -> Timing:
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(size=size, seconds=middle, spread=(high - low) / 2 / middle, samples=len(seconds), skew=skew)
