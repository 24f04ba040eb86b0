"""Campaign against one target: hypothesis draws, shrinks and stores cases; the guard runs each in a forked process."""

import importlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import SkipTest

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import composite

from fuzzing.case import Case, Target
from fuzzing.edits import Draw
from fuzzing.guard import SECONDS, Guard, Outcome
from fuzzing.oracle import Finding, Key, trace
from fuzzing.readers import TARGETS

ROUND = 200
"""Cases that hypothesis draws before it starts again. A round ends at its first new finding."""
DRAW = Phase.generate, Phase.target, Phase.shrink


@dataclass
class Tally:
    """Outcomes of a target's cases."""

    name: str
    cases: int = 0
    accepted: int = 0
    slowest: float = 0.0
    """Seconds of the slowest case."""
    mib: float = 0.0
    """Largest growth of memory in a case, in MiB."""
    found: dict[Key, Finding] = field(default_factory=dict)
    """Findings, in words that begin with the folder and the description of the simplest case."""


class Shown(Exception):
    """A case shows a new finding."""


class OutOfTime(BaseException):
    """The time of the campaign, or to look for a simpler case, is over; hypothesis lets it pass."""


class Campaign:
    """Cases of one target.

    home: empty folder. keep: folder for hypothesis's database and for files of findings. limit: seconds that a case may
    take. shrink: seconds to look for a simpler case of a finding. changed: called after each case.
    """

    stopped: ClassVar[bool] = False
    """Whether Ctrl-C was pressed: this process starts no more cases."""

    def __init__(
        self,
        name: str,
        home: Path,
        keep: Path,
        limit: float = SECONDS,
        shrink: float = 20.0,
        changed: Callable[[Tally], None] = lambda _: None,
    ) -> None:
        self.tally, self._changed, self._shrink = Tally(name), changed, shrink
        self._sizes = dict[Key, int]()
        self._keep = keep / name.replace(":", ".")
        self._home, self._limit = home, limit

    def run(self, seconds: float, seed: int = 0, cases: int | None = None) -> Tally:
        """Run the seeds and triggers, the stored findings of former campaigns, and drawn cases, until Ctrl-C.

        seed: of the first round. cases: number of drawn cases instead of as many as fit into `seconds`.
        """
        self._end = self._deadline = time.monotonic() + (0 if Campaign.stopped else seconds)
        for folder in ("seeds", "run"):
            (self._home / folder).mkdir()
        guard = None
        try:
            self._target = loaded(self.tally.name)(self._home / "seeds")
            self._guard = guard = Guard(self._target, self._home / "run", self._limit)
            for case in self._target.first():
                self._try(case)
            self._round((Phase.reuse,), 0, ROUND)
            while cases is None:
                self._round(DRAW, seed, ROUND)
                seed += 1
            if cases:
                self._round(DRAW, seed, cases)
        except OutOfTime:
            pass
        except KeyboardInterrupt:
            Campaign.stopped = True
        except Exception as error:
            self._record(Finding("harness", type(error).__name__, "?", trace(error)), Case({}))
        finally:
            if guard:
                guard.end()
        return self.tally

    def _round(self, phases: tuple[Phase, ...], seed: int, cases: int) -> None:
        known, shown = {*self.tally.found}, set[Key]()

        @composite
        def drawn(draw: Draw) -> Case:
            return self._target.drawn(draw)

        def attack(case: Case) -> None:
            outcome = self._try(case)
            hypothesis.target(outcome.mib, label="MiB")
            hypothesis.target(outcome.seconds, label="seconds")
            new = {finding.key for finding in outcome.findings} - known
            if new and not shown and phases == DRAW:
                self._deadline = min(self._end, time.monotonic() + self._shrink)
            if new and (not shown or new & shown or phases != DRAW):  # shrink one finding at a time
                shown.update((shown and new & shown) or new)
                raise Shown

        run = settings(
            max_examples=cases,
            phases=phases,
            database=DirectoryBasedExampleDatabase(self._keep / "examples"),
            deadline=None,
            suppress_health_check=[*HealthCheck],
            report_multiple_bugs=phases != DRAW,  # run all stored cases, also after one that fails
            verbosity=Verbosity.quiet,
        )(hypothesis.seed(seed)(given(drawn())(attack)))
        self._deadline = self._end
        try:
            run()
        except (Shown, hypothesis.errors.Flaky, SkipTest):  # SkipTest: nothing is stored
            pass
        except OutOfTime:
            if time.monotonic() > self._end:
                raise

    def _try(self, case: Case) -> Outcome:
        """Run a case and count it."""
        if time.monotonic() > self._deadline:
            raise OutOfTime
        outcome, tally = self._guard.run(case), self.tally
        tally.cases += 1
        tally.accepted += not outcome.refused
        tally.slowest, tally.mib = max(tally.slowest, outcome.seconds), max(tally.mib, outcome.mib)
        for finding in outcome.findings:
            self._record(finding, case)
        self._changed(tally)
        return outcome

    def _record(self, finding: Finding, case: Case) -> None:
        """Note a finding and keep the files of its case, unless a smaller one is known."""
        size, found = sum(map(len, case.files.values())), self.tally.found
        if size > self._sizes.setdefault(finding.key, size):
            return
        self._sizes[finding.key], found[finding.key] = size, finding
        folder = self._keep / f"{finding.kind}-{[*found].index(finding.key)}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        case.write(folder)
        found[finding.key] = finding._replace(words=f"{folder}: {case}\n{finding.words}")
        words = f"{case.argument!r}\n{found[finding.key].words}"
        (folder / "finding.txt").write_text(words, errors="backslashreplace")


def loaded(name: str) -> type[Target]:
    """Return the class of the target `name` in `fuzzing.readers.TARGETS`, or of `module:class`."""
    module, _, kind = TARGETS.get(name, name).partition(":")
    found: type[Target] = getattr(importlib.import_module(module), kind)
    return found
