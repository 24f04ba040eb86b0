"""Runs steps of what trains, and takes the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from vitpar.bench.feeds import Feed, Take
from vitpar.bench.result import WarmUp
from vitpar.parallel.phases import Phase, PhaseClock, untimed
from vitpar.planner.measure.clock import Group
from vitpar.training.build import Trained
from vitpar.training.garbage import Garbage

STEADY, BETTER, MOST = 3, 0.05, 50
"""Steps are steady when so many in a row are not faster than the fastest before by that part; so many are tried."""

Told = Callable[[str], None]
"""What is done now, in words."""


@dataclass(frozen=True)
class Phased:
    """Seconds of a step on this rank, and of its phases."""

    step: float
    phases: dict[str, float]


class Runner:
    """Runs steps of a model. All of it is collective."""

    def __init__(self, trained: Trained) -> None:
        self._model, self._device, self._step = trained.model, trained.model.device, trained.step()
        self._group = Group(self._device)

    def step(self, take: Take, phase: Phase = untimed) -> None:
        """One step, with learning rate 0."""
        self._step(1, 0.0, *take(phase))

    def most(self, value: float) -> float:
        """Of all ranks."""
        return self._group.agree([value])[0][0]

    @contextmanager
    def open(self, feed: Feed) -> Iterator[Take]:
        """The feed, when its queues are as they are in the middle of a training."""
        with feed.opened() as take, Garbage():
            for _ in range(feed.settling):
                self.step(take)
            yield take

    def warm_up(self, feed: Feed, wanted: int | None, told: Told) -> WarmUp:
        """Steps until they are steady, or as many as are `wanted`."""
        taken: list[float] = []
        fastest, since = float("inf"), 0
        with feed.opened() as take:
            while len(taken) < (MOST if wanted is None else wanted) and (wanted is not None or since < STEADY):
                told(f"warming up, step {len(taken) + 1}")
                begun = self._synchronised()
                self.step(take)
                taken.append(self.most(self._synchronised() - begun))
                since = 0 if taken[-1] < (1 - BETTER) * fastest else since + 1
                fastest = min(fastest, taken[-1])
        return WarmUp(len(taken), taken[0] if taken else 0.0, since >= STEADY)

    def run(self, feed: Feed, steps: int) -> float:
        """Seconds of a step, in the mean, for the slowest rank."""
        with self.open(feed) as take:
            begun = self._synchronised()
            for _ in range(steps):
                self.step(take)
            return self.most(self._synchronised() - begun) / steps

    def phases(self, feed: Feed, steps: int) -> Phased:
        """The same with its phases, on this rank."""
        clock = PhaseClock(self._device)
        with self.open(feed) as take:
            self._synchronised()
            self._model.phase = clock
            try:
                begun = time.perf_counter()
                for _ in range(steps):
                    self.step(take, clock)
                found = clock.read()
                whole = time.perf_counter() - begun
            finally:
                self._model.phase = untimed
        return Phased(whole / steps, {name: seconds / steps for name, seconds in found.items()})

    def _synchronised(self) -> float:
        """Now, when all ranks have done what they were given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._group.meet()
        return time.perf_counter()
