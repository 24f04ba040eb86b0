"""Python's garbage collector, kept from running in the middle of a step.

Left alone it runs whenever enough objects were made: on each rank at another step, while all others wait for that rank.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

EVERY_S = 5.0
"""Seconds between two collections, about."""


class Garbage:
    """Inside the ``with`` it runs only at steps that all ranks have in common, and not over what was there before."""

    def __init__(self) -> None:
        self._next = 0
        self._was_on = gc.isenabled()

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.unfreeze()
        if self._was_on:
            gc.enable()

    def collect(self) -> None:
        """Now."""
        gc.collect()

    def look(self, number: int, seconds: float) -> None:
        """After step `number`. seconds: that a step takes, as all ranks were told. The first steps make most of what
        is never freed."""
        if number >= self._next:
            self.collect()
            self._next = number + (max(1, int(EVERY_S / seconds)) if seconds else 1)
