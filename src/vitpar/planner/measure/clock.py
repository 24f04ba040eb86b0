"""Timing of work that several processes do at the same time, corrected for changes in the speed of CPU cores.

On a machine whose cores other programs share, the same instructions may take twice as long a second later. So each
reading on a CPU is taken between two runs of a fixed piece of work (`CpuSpeedProbe`) and scaled to its usual duration.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from vitpar.launch.resources import cpu_cores
from vitpar.launch.world_group import all_reduce_, barrier
from vitpar.planner.profile.curves import Timing

SHORTEST = 1e-3  # seconds of a reading at least: shorter work is repeated within it
FEWEST, MOST = 5, 25  # readings of a point; work that is repeated within a reading needs only three
PACES = 25  # runs of the speed probe that define the pace
AHEAD = 0.02  # seconds that a GPU sleeps, in which the host queues the work to be timed
CYCLES = 2_000_000_000  # a second of a GPU's clock at least
_Phases = tuple[Callable[[], object], ...]
Progress = Callable[[int, int, str], None]
"""Callback that receives (points done, points in total, name of the next point)."""


class CpuSpeedProbe:
    """A fixed piece of CPU work: forward and backward of an MLP that exceeds a core's private caches.

    So it slows down with memory traffic as a ViT's layers do; matrix products alone would not.
    """

    def __init__(self, rows: int = 512, width: int = 128) -> None:
        layers = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self._mlp, self._x = nn.Sequential(*layers), torch.ones(rows, width)
        self._parameters = tuple(self._mlp.parameters())

    def read(self) -> float:
        """Run the work once and return its CPU seconds, a few thousandths."""
        # CPU time of this thread: time in which other processes of ours hold the core does not count.
        begun = time.thread_time()
        torch.autograd.grad(self._mlp(self._x).sum(), self._parameters)
        return time.thread_time() - begun


STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of a core in `STAT` that count busy time: user, nice, system, irq, softirq, steal (other virtual machines).
Source: proc_stat(5)."""


def core_use(stat: Path = STAT) -> tuple[float, float, float] | None:
    """Return CPU seconds until now on the cores that this process may run on; None where `stat` is missing or zeros.

    They are those of all programs, other virtual machines included; those of this process; and those that the cores
    could have provided, from an arbitrary start.
    """
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        cores = [f"cpu{number}" for number in os.sched_getaffinity(0)]
        ticks = [int(line[1 + column]) for line in lines if line and line[0] in cores for column in BUSY]
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    if not any(ticks):  # sandboxes show zeros
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK"), time.process_time(), time.monotonic() * len(cores)


def others_share(ranks: Iterable[tuple[str, float, float, float]]) -> float | None:
    """Return the share of the cores, 0 to 1, that programs other than the ranks used; the largest over all machines.

    ranks: for each rank, its machine and how much the numbers of `core_use` rose there.

    Returns None if the measurement was too short for the ticks of the system's clock.
    """
    machines: defaultdict[str, list[list[float]]] = defaultdict(list)
    for machine, *times in ranks:
        machines[machine].append(times)
    shares = []
    for each in machines.values():
        busy, own, capacity = zip(*each, strict=True)
        if max(capacity) > 0.2:
            shares.append(min(1.0, max(0.0, (max(busy) - sum(own)) / max(capacity))))
    return max(shares, default=None)


def load_share() -> float | None:
    """Return the share of the cores used in the last minute, 0 to 1, by the load average; None if it is unknown.

    For systems without `STAT`.
    """
    try:
        return min(1.0, os.getloadavg()[0] / cpu_cores())
    except (OSError, AttributeError):
        return None


class ClockedRanks:
    """The ranks of the world as one clock: the slowest rank's time counts, since collectives end for all together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def meet(self) -> None:
        """Wait until all ranks have arrived."""
        if dist.get_world_size() > 1:
            barrier()

    def agree(self, seconds: list[float]) -> tuple[list[float], list[float]]:
        """Return (maximum over the ranks of each number, zeros as skews); equal on all ranks."""
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        all_reduce_(slowest, dist.ReduceOp.MAX)
        return slowest.tolist(), [0.0] * len(seconds)

    def mean(self, seconds: list[float]) -> list[float]:
        """Return the mean over the ranks of each number; equal on all ranks."""
        sums = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        all_reduce_(sums)
        return (sums / dist.get_world_size()).tolist()


class Neighbours:
    """Processes on one machine as one clock, without a process group: each may be in a different, fake world.

    The mean over the processes counts, since layers do not wait for other ranks. The skew is how much the slowest
    exceeds the mean, which counts where ranks wait for each other, and everywhere if they share cores
    (``ModelProfile.steady``). Methods are those of `ClockedRanks`.

    store: exchanges the numbers; None for a single process.
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
    """Timer of functions that several processes call at the same time.

    together: the processes.
    seconds: approximate time to spend on each point.
    """

    def __init__(self, device: torch.device, together: ClockedRanks | Neighbours, seconds: float) -> None:
        self.device, self._together, self.seconds = device, together, seconds
        self._work = CpuSpeedProbe() if device.type == "cpu" else None
        self._paces: list[float] = []

    @cached_property
    def pace(self) -> float:
        """Return the seconds of `CpuSpeedProbe` that all timings are scaled to; 0 on GPUs. Collective on first use."""
        return statistics.fmean(self._together.mean([self._paced() for _ in range(PACES)]))

    @property
    def usual(self) -> float:
        """Return the mean seconds of the speed probe over all readings until now."""
        return statistics.fmean(self._paces)

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
        once, _ = self._together.agree(read(phases, 1))
        inner = max(1, math.ceil(shortest / min(once)))
        samples = min(MOST, max(FEWEST if inner == 1 else 3, int(self.seconds / (inner * sum(once) + extra))))
        readings = self._readings(samples, lambda: read(phases, inner))
        agreed, more = ([seconds / inner for row in rows for seconds in row] for rows in readings)
        timings, each = [], len(phases)
        for taken, skews in ((agreed[n::each], more[n::each]) for n in range(each)):
            low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
            spread, skew = (high - low) / 2 / middle, statistics.median(skews)
            timings.append(Timing(size=size, seconds=middle, spread=spread, samples=len(taken), skew=skew))
        return tuple(timings)

    def middle(self, read: Callable[[], float], samples: int = 7) -> float:
        """Return the median of the seconds that `read` returns over `samples` calls. Collective."""
        return statistics.median(row[0] for row in self._readings(samples, lambda: [read()])[0])

    def computed(self) -> None:
        """Wait until the device has finished computing; communication on other streams may continue."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _readings(self, samples: int, read: Callable[[], list[float]]) -> tuple[list[list[float]], list[list[float]]]:
        """Return (seconds, skews) of each reading, combined over the processes and scaled to the usual pace."""
        pace, rows, paces = self.pace, [], [self._paced()]
        for _ in range(samples):
            self._together.meet()
            rows.append(read())
            paces.append(self._paced())
        flat = self._together.agree([seconds for row in rows for seconds in row])
        paces = self._together.mean(paces)
        self._paces += paces
        # Each reading is scaled by the probe's mean before and after it.
        factors = [2 * pace / (before + after) if pace else 1.0 for before, after in pairwise(paces)]
        each = len(rows[0])
        agreed, more = (
            [[factor * s for s in values[n * each : (n + 1) * each]] for n, factor in enumerate(factors)]
            for values in flat
        )
        return agreed, more

    def _paced(self) -> float:
        """Run the speed probe on all processes at once; 0 on GPUs."""
        if self._work is None:
            return 0.0
        # A process that is done must not run the probe on a core while another still measures on it.
        self._together.meet()
        return self._work.read()

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
