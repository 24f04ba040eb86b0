"""Named phases of a step, so that a caller can time each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Phase = Callable[[str], AbstractContextManager[object]]
"""Callable that returns, for the name of a phase, the context manager that the phase runs in."""
untimed: Phase = nullcontext
"""No-op timer."""


class PhaseClock:
    """A `Phase` that measures time: ``model.phase = PhaseClock(device)``.

    On a GPU it takes the time between two CUDA events, so nothing waits for the device before `read`. This includes
    times in which the GPU idles because the host launches too slowly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the phase `name`. Phases must not be nested, or their sum exceeds the elapsed time."""
        begun = self._now()
        yield
        self._marks.append((name, begun, self._now()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, by name, in order of appearance.

        Waits for the device.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: dict[str, float] = {}
        for name, begun, ended in self._marks:
            elapsed = begun.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - begun
            seconds[name] = seconds.get(name, 0.0) + elapsed
        self._marks.clear()
        return seconds

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
