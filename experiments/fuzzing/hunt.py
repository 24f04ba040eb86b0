"""Control of the workers: starts them, distributes cases, kills hung ones, and collects findings."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fuzzing.guard import SECONDS
from fuzzing.oracle import READERS, Finding, short
from fuzzing.process import Died, Hang, Process

MAKING_S = 120.0
"""Time limit in seconds for imports, making seeds, and making one case."""
SLACK_S = 0.5
"""Seconds beyond the time limit of a case after which the worker counts as hung."""
MOST_FAULTS = 3
"""Number of errors of the fuzzer itself after which it skips the rest of a target."""


@dataclass
class Found:
    """A finding, with the smallest case that shows it."""

    finding: Finding
    case: int
    """Number of the case."""
    how: str
    """Description of the mutation."""
    bytes: int
    """Size of the case."""
    times: int = 1
    """Number of cases with this finding."""


@dataclass
class Tally:
    """Outcomes of a target's cases."""

    name: str
    cases: int = 0
    accepted: int = 0
    """Number of cases that the reader accepted."""
    slowest: float = 0.0
    """Seconds of the slowest case."""
    longest: int = 0
    """Number of the slowest case."""
    mib: float = 0.0
    """Largest growth of memory in a case, in MiB."""
    told: str | None = None
    """Error message of the last case, None if it was accepted."""
    found: dict[tuple[str, str, str], Found] = field(default_factory=dict)
    """Findings by (kind, sort, place)."""

    def took(self, seconds: float, case: int) -> None:
        """Count a case that took `seconds`."""
        self.cases += 1
        if seconds > self.slowest:
            self.slowest, self.longest = seconds, case

    def keep(self, finding: Finding, case: int, how: str, size: int) -> None:
        """Add a finding; of equal findings, keep the smallest case."""
        key = finding.kind, finding.sort, finding.where
        known = self.found.setdefault(key, Found(finding, case, how, size, times=0))
        known.times += 1
        if size < known.bytes:
            known.finding, known.case, known.how, known.bytes = finding, case, how, size


class Slot:
    """One of the parallel workers. Its process is replaced when it has ended.

    changed: called when a tally has changed. limit: seconds that a case may take.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None, limit: float = SECONDS) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vitpar-fuzz-", ignore_cleanup_errors=True)
        self._home, self._changed, self._limit = Path(self._folder.name), changed, limit
        self._process: Process | None = None
        self._stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    def stop(self) -> None:
        """Make `attack` return; called from another thread."""
        self._stopped = True
        if process := self._process:
            process.kill()

    @property
    def case(self) -> Path:
        """Folder of the last case."""
        return self._home / "case"

    def attack(self, tally: Tally, first: int, last: int | None, seconds: float) -> None:
        """Run the cases `first` to `last` of a target, or as many as fit into `seconds`.

        A worker that hangs or dies is replaced.
        """
        end, faults = time.monotonic() + seconds, 0
        self._next, self._doubtful = first, -1
        while (
            (last is None or self._next <= last)
            and time.monotonic() < end
            and faults < MOST_FAULTS
            and not self._stopped
        ):
            self._process = self._process or Process(self._home)
            self._process.order(tally.name, self._next, last, end - time.monotonic())
            try:
                if self._listen(tally):
                    return
            except Hang:
                words = f"takes more than {self._limit:g} s\n{self._process.stack()}"
                faults += self._ended(tally, Finding("hang", "", _where(words), words))
            except Died:
                if self._stopped:
                    break
                said, status = self._process.said(), self._process.status()
                name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
                words = f"the process ended: {name}\n{said[-3000:]}"
                faults += self._ended(tally, Finding("crash", name, _where(said), words))
            self._end()
            self._changed()

    def _listen(self, tally: Tally) -> bool:
        """Process messages until the order is done or the worker retires; return whether the order is done."""
        assert self._process is not None
        self._case: dict[str, Any] = {}
        while True:
            heard = self._process.hear(self._limit + SLACK_S if "reading" in self._case else MAKING_S)
            if "over" in heard:
                self._next = heard["over"]
                return not heard.get("retired")
            if "done" in heard:
                self._count(tally, heard, self._case)
                self._next = heard["done"] + 1
            self._case = {} if "done" in heard else heard

    def _ended(self, tally: Tally, finding: Finding) -> bool:
        """Add the finding that ended the process; return whether it is an error of the fuzzer itself."""
        if "reading" not in self._case:
            tally.keep(replace(finding, kind="harness", where="?"), self._next, "made", 0)
            self._next += 1
            return True
        if finding.kind == "hang" and self._doubtful != self._next:
            self._doubtful = self._next  # the machine may have been slow: run the case again
            return False
        tally.keep(finding, self._next, self._case["how"], self._case["bytes"])
        tally.took(self._limit if finding.kind == "hang" else 0.0, self._next)
        self._next += 1
        return False

    def _count(self, tally: Tally, done: dict[str, Any], case: dict[str, Any]) -> None:
        tally.took(done["seconds"], done["done"])
        tally.accepted += done["accepted"]
        tally.mib, tally.told = max(tally.mib, done["mib"]), done["told"]
        for finding in done["findings"]:
            tally.keep(Finding(**finding), done["done"], case["how"], case["bytes"])
        self._changed()

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


def _where(stack: str) -> str:
    """Return file:line of the innermost frame of vitpar, in the first thread that has one."""
    for line in stack.split("\n"):
        if f'File "{READERS}' in line:
            path, number = line.split('"')[1], line.split(", line ")[1].split(" ")[0]
            return f"{short(path)}:{number}"
    return "?"


def hunt(
    tallies: Mapping[str, Tally],
    *,
    parallel: int = 2,
    seconds: float = 600.0,
    cases: int | None = None,
    limit: float = SECONDS,
    changed: Callable[[], None] = lambda: None,
) -> None:
    """Fuzz targets, `parallel` at a time: `cases` of each, or an equal share of `seconds`.

    tallies: empty tallies by name of the target; results are added to them. limit: seconds that a case may take.
    changed: called when a tally has changed.
    """
    queue, lock, failed = list(tallies.values()), threading.Lock(), list[BaseException]()
    slots = min(parallel, len(queue))
    share, last = (seconds * slots / len(queue), None) if cases is None else (float("inf"), cases - 1)

    open_slots: list[Slot] = []

    def work() -> None:
        try:
            with Slot(changed, limit) as slot:
                open_slots.append(slot)
                while True:
                    with lock:
                        if not queue or failed:
                            return
                        tally = queue.pop(0)
                    slot.attack(tally, 0, last, share)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(slots)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        queue.clear()
        for slot in open_slots:
            slot.stop()
        for thread in threads:
            thread.join(5)
        raise
    if failed:
        raise failed[0]
