"""The parent: starts workers, gives out cases, ends what hangs, and keeps what was found."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fuzzing.guard import SECONDS
from fuzzing.oracle import READERS, Finding, short
from fuzzing.process import Died, Hang, Process

MAKING_S = 120.0
"""To import everything, make seeds, or make one case."""
SLACK_S = 0.5


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
    """What became of the cases of a target. slowest, longest: seconds of the slowest case, and its number. mib: above
    what there was before a case, at most. told: of the last refusal."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._folder.cleanup()

    @property
    def case(self) -> Path:
        """Where the files of the last case are."""
        return self._home / "case"

    def attack(self, tally: Tally, first: int, last: int | None, seconds: float) -> None:
        """Run the cases `first` to `last` of a target, or as many as there is time for, whatever ends meanwhile."""
        end, number, doubtful, case = time.monotonic() + seconds, first, -1, {}
        while (last is None or number <= last) and time.monotonic() < end:
            self._process = self._process or Process(self._home)
            self._process.order(tally.name, number, last, end - time.monotonic())
            try:
                while True:
                    heard = self._process.hear(self._limit + SLACK_S if "reading" in case else MAKING_S)
                    if "over" in heard:
                        number, case = heard["over"], {}
                        if heard.get("retired"):
                            self._end()
                            break
                        return
                    if "done" in heard:
                        self._count(tally, heard, case)
                        number, case = heard["done"] + 1, {}
                    else:
                        case = heard
            except Hang:
                stack = self._process.stack()
                self._end()
                if "reading" not in case:
                    raise RuntimeError(f"the harness itself hangs at {tally.name} {number}:\n{stack}") from None
                if doubtful == number:  # once may have been the machine
                    words = f"takes more than {self._limit:g} s\n{stack}"
                    tally.keep(Finding("hang", "", _where(stack), words), number, case["how"], case["bytes"])
                    tally.took(self._limit, number)
                    number += 1
                else:
                    doubtful = number
                case = {}
            except Died:
                said, status = self._process.said(), self._process.status()
                self._end()
                if "reading" not in case:
                    raise RuntimeError(
                        f"the harness itself fails at {tally.name} {number} ({status}):\n{said}"
                    ) from None
                name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
                finding = Finding("crash", name, _where(said), f"the process ended: {name}\n{said[-3000:]}")
                tally.keep(finding, number, case["how"], case["bytes"])
                tally.took(0.0, number)
                number, case = number + 1, {}
            self._changed()

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
    targets: list[str], *, parallel: int, seconds: float, cases: int | None, changed: Callable[[], None], tallies: Any
) -> None:
    """Attack the targets, `parallel` at a time: `cases` of each, or for an even share of `seconds`."""
    queue, lock, failed = list(targets), threading.Lock(), list[BaseException]()
    share = seconds * min(parallel, len(targets)) / len(targets)

    def work() -> None:
        try:
            with Slot(changed) as slot:
                while True:
                    with lock:
                        if not queue or failed:
                            return
                        tally = tallies[queue.pop(0)]
                    slot.attack(tally, 0, None if cases is None else cases - 1, share if cases is None else 1e9)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(parallel, len(targets)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
