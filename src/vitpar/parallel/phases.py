"""Named parts of a step, so that a caller can time each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Phase = Callable[[str], AbstractContextManager[object]]
"""Context manager that a part of a step runs in, by the part's name."""
_UNTIMED = nullcontext()


def untimed(name: str) -> AbstractContextManager[object]:
    """No-op timer."""
    return _UNTIMED


class PhaseClock:
    """A `Phase` that takes the time: ``model.phase = PhaseClock(device)``.

    On a GPU it is the time between two events in the queue of its work, so that nothing waits for the device before
    `read`; a phase in which the GPU has nothing to do, because the host is late, lasts as long as that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The phase `name`. Phases must not lie in each other, or they add up to more than there was."""
        begun = self._now()
        yield
        self._marks.append((name, begun, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds of all phases since the last time, by name, in the order in which they came. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: dict[str, float] = {}
        for name, begun, ended in self._marks:
            found[name] = found.get(name, 0.0) + self._between(begun, ended)
        self._marks.clear()
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        return begun.elapsed_time(ended) / 1e3 if self._device.type == "cuda" else ended - begun
