"""Thread that writes a run to one tracker."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Full, Queue
from threading import Thread, enumerate

from vitpar.text import printable, shown
from vitpar.training.tracking.writers import WRITERS, TrackedRun

CAPACITY = 2_000
"""Rows that wait for a tracker at most."""
CALL_S = 30.0
"""Seconds after which a call of a tracker is given up, and the tracker with it."""
_THREADS = "vitpar-track"
"""Begin of the names of the threads."""


def are_hanging() -> bool:
    """Return whether a call of a tracker has not returned, so that an exit handler of its library may not either."""
    return any(thread.name.startswith(_THREADS) for thread in enumerate())


class Tracker:
    """Tracker of a run. Its thread is a daemon, since a call that never returns must not keep the program alive.

    A tracker that fails, or that cannot keep up, is given up with one warning.
    """

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name = name
        self._rows = Queue[tuple[int, float, Mapping[str, float]] | None](CAPACITY)
        self._begun: float | None = time.monotonic()
        self._failed, self._problem, self._told = False, "", False
        self._thread = Thread(target=self._write, args=(run,), name=f"{_THREADS}-{name}", daemon=True)
        self._thread.start()

    def put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step. Never waits."""
        begun = self._begun
        if begun is not None and time.monotonic() - begun > CALL_S:
            self._give_up(f"a call did not return in {CALL_S:g} s")
        try:
            self._rows.put_nowait((step, time.time(), values))
        except Full:
            self._give_up(f"it is too slow: {CAPACITY:,} rows wait for it")

    def close(self, failed: bool) -> None:
        """Announce the end of the run, which comes after all rows. failed: whether the run failed."""
        self._failed = failed
        with suppress(Full):  # then the tracker is given up
            self._rows.put_nowait(None)

    def join(self, deadline: float) -> None:
        """Wait until the tracker has written everything, at most until `deadline` of ``time.monotonic``."""
        if not self._problem:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._give_up("it did not finish in time, so its last values may be missing")

    def problem(self) -> str | None:
        """Return a warning about the tracker, once; None if there is nothing new."""
        if self._told or not self._problem:
            return None
        self._told = True
        return f"the tracker {self.name} failed, and the run continues without it: {self._problem}"

    def _give_up(self, problem: str) -> None:
        self._problem = self._problem or problem

    def _write(self, run: TrackedRun) -> None:
        """Make the writer, and write all rows until the run ends. Runs in the thread."""
        try:
            writer = WRITERS[self.name](run)
            self._begun = None
            while (row := self._rows.get()) is not None and not self._problem:
                self._begun = time.monotonic()
                writer.log(*row)
                self._begun = None
            if not self._problem:
                writer.close(self._failed)
        except BaseException as error:  # SystemExit too
            self._give_up(printable(shown(" ".join(f"{type(error).__name__}: {error}".split()))))
