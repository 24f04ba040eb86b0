"""The parent: starts workers, gives out cases, ends what hangs, and keeps what was found."""

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
"""To import everything, make seeds, or make one case."""
SLACK_S = 0.5
MOST_FAULTS = 3
"""Faults of the harness itself after which it gives up a target."""


@dataclass
class Found:
    """A finding with the case that shows it with the fewest bytes. times: cases that show it."""

    finding: Finding
    case: int
    how: str
    bytes: int
    times: int = 1


@dataclass
class Tally:
    """Outcomes of a target's cases.

    slowest, longest: seconds of the slowest case, and its number.
    mib: largest growth of memory in a case.
    told: message of the last refusal.
    """

    name: str
    cases: int = 0
    accepted: int = 0
    slowest: float = 0.0
    longest: int = 0
    mib: float = 0.0
    told: str | None = None
    found: dict[tuple[str, str, str], Found] = field(default_factory=dict)

    def took(self, seconds: float, case: int) -> None:
        """Count a case."""
        self.cases += 1
        if seconds > self.slowest:
            self.slowest, self.longest = seconds, case

    def keep(self, finding: Finding, case: int, how: str, size: int) -> None:
        """Note a finding; among those that are alike the case of the fewest bytes."""
        key = finding.kind, finding.sort, finding.where
        known = self.found.setdefault(key, Found(finding, case, how, size, times=0))
        known.times += 1
        if size < known.bytes:
            known.finding, known.case, known.how, known.bytes = finding, case, how, size


class Slot:
    """One of the workers that run at a time; it gets a new process where one has ended."""

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
        """Let `attack` return, from another thread."""
        self._stopped = True
        if process := self._process:
            process.kill()

    @property
    def case(self) -> Path:
        """Where the files of the last case are."""
        return self._home / "case"

    def attack(self, tally: Tally, first: int, last: int | None, seconds: float) -> None:
        """Run the cases `first` to `last` of a target, or as many as there is time for, whatever ends meanwhile."""
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
        """Hear of cases until the order is obeyed, or the process has retired; returns whether it is obeyed."""
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
        """Keep the finding that ended the process; returns whether it is a fault of the harness."""
        if "reading" not in self._case:
            tally.keep(replace(finding, kind="harness", where="?"), self._next, "made", 0)
            self._next += 1
            return True
        if finding.kind == "hang" and self._doubtful != self._next:
            self._doubtful = self._next  # once may have been the machine: it is run again
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
    """The innermost line of vitpar's among the threads of a process, the first thread that has one."""
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
    """Attack targets, `parallel` at a time: `cases` of each, or for an even share of `seconds`.

    tallies: by the names of the targets; they are filled. limit: seconds that a case may take. changed: called when one
    of them has.
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
