"""Timing of work that several processes do at the same time."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from vitpar.launch.world_group import all_reduce_, barrier
from vitpar.planner.profile.curves import Timing

SHORTEST = 1e-3  # seconds of a reading at least: shorter work is repeated within it
FEWEST, MOST = 5, 25  # readings of a point; work that is repeated within a reading needs only three
AHEAD = 0.02  # seconds that a GPU sleeps, in which the host queues the work to be timed
CYCLES = 2_000_000_000  # a second of a GPU's clock at least
_Phases = tuple[Callable[[], object], ...]
Progress = Callable[[int, int, str], None]
"""Callback that receives (points done, points in total, name of the next point)."""


class ClockedRanks:
    """The ranks of the world as one clock: the slowest rank's time counts, since collectives end for all together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def meet(self) -> None:
        """Wait until all ranks have arrived."""
        if dist.get_world_size() > 1:
            barrier()

    def agree(self, seconds: list[float]) -> list[float]:
        """Return the maximum over the ranks of each number; equal on all ranks."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        all_reduce_(slowest, dist.ReduceOp.MAX)
        return slowest.tolist()


class Neighbours:
    """Processes on one machine as one clock, without a process group: each may be in a different, fake world.

    The mean over the processes counts, since layers do not wait for other ranks. Where processes share cores it is the
    time of the slowest: all begin a reading at once, and the process that the system's scheduler serves first is done
    before the others. In a training step that process goes on with its next layer, so each process spends on a layer
    the time that the core needs for every process's layer. Methods are those of `ClockedRanks`.

    store: exchanges the numbers; None for a single process.
    shared: whether the processes share cores.
    """

    def __init__(self, rank: int, size: int, store: dist.Store | None, shared: bool = False) -> None:
        self.rank, self._size, self._store, self._round = rank, size, store, 0
        self._over = max if shared else statistics.fmean

    def meet(self) -> None:
        self.agree([])

    def agree(self, seconds: list[float]) -> list[float]:
        if self._store is None:
            return seconds
        self._round += 1
        keys = [f"vitpar/{self._round}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self.rank], json.dumps(seconds))
        every = [json.loads(self._store.get(key)) for key in keys]
        return [self._over(values) for values in zip(*every, strict=True)]


class Clock:
    """Timer of functions that several processes call at the same time.

    together: the processes.
    seconds: approximate time to spend on each point.
    """

    def __init__(self, device: torch.device, together: ClockedRanks | Neighbours, seconds: float) -> None:
        self.device, self._together, self.seconds = device, together, seconds

    def timing(self, size: int, work: Callable[[], object]) -> Timing:
        """Return the timing of `work` alone, from its first call until the device is done.

        It is the median of several readings. Collective; equal on all processes.

        size: size to record in the timing.
        """
        return self._timings(size, (work,), self._read, SHORTEST)[0]

    def timings(self, size: int, *phases: Callable[[], object], host: bool = True) -> tuple[Timing, ...]:
        """Return the timings of functions that run one after the other in a step, such as forward and backward.

        On a GPU, each takes the time of its kernels, or that in which the host queues them if it is longer: in a step
        the host is ahead where it is faster, and the GPU waits for it where it is not.

        host: whether the host's time counts.
        """
        if self.device.type == "cuda":
            return self._timings(size, phases, partial(self._read_queued, host), extra=AHEAD)
        return self._timings(size, phases, self._read, SHORTEST)

    def _timings(
        self,
        size: int,
        phases: _Phases,
        read: Callable[[_Phases, int], list[float]],
        shortest: float = 0.0,
        extra: float = 0.0,
    ) -> tuple[Timing, ...]:
        """Return what `timings` does.

        shortest: seconds of each phase in a reading at least.
        extra: seconds of a reading besides the phases.
        """
        # The first call allocates and compiles; it is not timed.
        for phase in phases:
            phase()
        once = self._together.agree(read(phases, 1))
        inner = max(1, math.ceil(shortest / min(once)))
        samples = min(MOST, max(FEWEST if inner == 1 else 3, int(self.seconds / (inner * sum(once) + extra))))
        timings = []
        for taken in zip(*self._readings(samples, lambda: read(phases, inner)), strict=True):
            low, middle, high = (s / inner for s in statistics.quantiles(taken, n=4, method="inclusive"))
            spread = (high - low) / 2 / middle
            timings.append(Timing(size=size, seconds=middle, spread=spread, samples=samples))
        return tuple(timings)

    def middle(self, read: Callable[[], float], samples: int = 7) -> float:
        """Return the median of the seconds that `read` returns over `samples` calls. Collective."""
        return statistics.median(row[0] for row in self._readings(samples, lambda: [read()]))

    def computed(self) -> None:
        """Wait until the device has finished computing; communication on other streams may continue."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _readings(self, samples: int, read: Callable[[], list[float]]) -> list[list[float]]:
        """Return the seconds of each reading, combined over the processes."""
        rows = []
        for _ in range(samples):
            self._together.meet()
            rows.append(read())
        agreed, each = self._together.agree([seconds for row in rows for seconds in row]), len(rows[0])
        return [agreed[n : n + each] for n in range(0, len(agreed), each)]

    def _read(self, phases: _Phases, times: int) -> list[float]:
        """Return the seconds of each phase, each called `times` times in a row."""
        taken = []
        for phase in phases:
            begun = self._now()
            for _ in range(times):
                phase()
            taken.append(self._now() - begun)
        return taken

    def _read_queued(self, host: bool, phases: _Phases, times: int) -> list[float]:
        """Return what `_read` does, for a GPU that begins when everything is queued. host: as for `timings`."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(phases) + 1)]
        torch.cuda.synchronize(self.device)
        torch.cuda._sleep(int(AHEAD * CYCLES))
        events[0].record()
        queued = [time.perf_counter()]
        for phase, event in zip(phases, events[1:], strict=True):
            for _ in range(times):
                phase()
            event.record()
            queued.append(time.perf_counter())
        torch.cuda.synchronize(self.device)
        computing = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
        queueing = [end - begin if host else 0.0 for begin, end in pairwise(queued)]
        return [*map(max, computing, queueing)]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
