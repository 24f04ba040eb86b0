"""Campaign against one target: hypothesis draws, shrinks and stores cases; the guard runs each in a forked process."""

import hashlib
import importlib
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import SkipTest

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, example, given, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import composite

from fuzzing.case import Case, Draw, Target
from fuzzing.guard import SECONDS, Guard
from fuzzing.oracle import Finding, Key, trace

ROUND = 200
"""Cases that hypothesis draws before it starts again. A round ends at its first new finding."""
DRAW = Phase.generate, Phase.target, Phase.shrink


@dataclass
class Found:
    """A finding, with the simplest case that shows it."""

    finding: Finding
    case: str
    """Description of the case."""
    times: int = 0
    """Cases with this finding."""
    folder: Path | None = None
    """Folder that keeps the files of the case."""
    size: int = 0
    """Bytes of the files."""


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
    found: dict[Key, Found] = field(default_factory=dict)
    done: bool = False
    """Whether the campaign has ended."""

    def note(self, finding: Finding, case: str = "") -> Found:
        """Add a finding, or replace its case by a simpler one."""
        found = self.found.setdefault(finding.key, Found(finding, case))
        found.finding, found.case = finding, case
        return found


class Shown(Exception):
    """A case shows a finding. A subclass for each finding lets hypothesis tell them apart."""


class OutOfTime(BaseException):
    """The time of the campaign, or to look for a simpler case, is over; hypothesis lets it pass."""


class Campaign:
    """Cases of one target.

    home: empty folder. keep: folder for hypothesis's database and for files of findings. limit: seconds that a case may
    take. shrink: seconds to look for a simpler case of a finding. changed: called after each case.
    """

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
        self._keep = keep / name.replace(":", ".")
        for folder in ("seeds", "run"):
            (home / folder).mkdir()
        self._target = loaded(name)(home / "seeds")
        self._guard = Guard(self._target, home / "run", limit)
        self._kinds = dict[Key, type[Shown]]()

    def run(self, seconds: float, seed: int = 0, cases: int | None = None) -> None:
        """Run the triggers, the stored findings of former campaigns, and drawn cases.

        seed: of the first round. cases: number of drawn cases instead of as many as fit into `seconds`.
        """
        self._end = time.monotonic() + seconds
        try:
            self._round((Phase.explicit,), 0, ROUND)
            self._round((Phase.reuse,), 0, ROUND)
            while cases is None:
                self._round(DRAW, seed, ROUND)
                seed += 1
            if cases:
                self._round(DRAW, seed, cases)
        except* OutOfTime:
            pass
        except* Exception as errors:
            for error in errors.exceptions:
                self._record(Finding("harness", type(error).__name__, "?", trace(error)), Case({}))
        self._guard.end()
        self.tally.done = True
        self._changed(self.tally)

    def _round(self, phases: tuple[Phase, ...], seed: int, cases: int) -> None:
        known, shown, end = {*self.tally.found}, dict[bytes, list[Finding]](), self._end

        def attack(case: Case) -> None:
            nonlocal end
            identity = hashlib.blake2b(pickle.dumps((case.files, case.argument))).digest()
            if identity not in shown:
                if time.monotonic() > end:
                    raise OutOfTime
                new = [finding for finding in self._findings(case) if finding.key not in known]
                if not new:
                    return
                end = time.monotonic() + self._shrink if phases == DRAW and not shown else end
                shown[identity] = new
            for finding in shown[identity]:
                self._record(finding, case)
            first = shown[identity][0]
            raise self._kinds.setdefault(first.key, type("Shown", (Shown,), {}))(first.words)

        @composite
        def drawn(draw: Draw) -> Case:
            return self._target.drawn(draw)

        for case in self._target.first() if Phase.explicit in phases else ():
            attack = example(case)(attack)
        run = settings(
            max_examples=cases,
            phases=phases,
            database=DirectoryBasedExampleDatabase(self._keep / "examples"),
            deadline=None,
            suppress_health_check=[*HealthCheck],
            report_multiple_bugs=phases != DRAW,  # run all triggers and stored cases, also after one that fails
            verbosity=Verbosity.quiet,
        )(hypothesis.seed(seed)(given(drawn())(attack)))
        try:
            run()
        except* (Shown, hypothesis.errors.Flaky, SkipTest):  # SkipTest: nothing is stored
            pass
        except* OutOfTime:
            if not shown or phases != DRAW:
                raise

    def _findings(self, case: Case) -> list[Finding]:
        """Run a case, count it, and return the findings."""
        outcome, tally = self._guard.run(case), self.tally
        tally.cases += 1
        tally.accepted += outcome.refusal is None
        tally.slowest, tally.mib = max(tally.slowest, outcome.seconds), max(tally.mib, outcome.mib)
        hypothesis.target(outcome.mib, label="MiB")
        hypothesis.target(outcome.seconds, label="seconds")
        for finding in outcome.findings:
            self.tally.found.setdefault(finding.key, Found(finding, repr(case))).times += 1
        self._changed(tally)
        return outcome.findings

    def _record(self, finding: Finding, case: Case) -> None:
        """Note a finding and keep the files of its case, unless a smaller one is known."""
        known, size = self.tally.found.get(finding.key), sum(len(data) for data in case.files.values())
        if known and known.folder and size > known.size:
            return
        found = self.tally.note(finding, repr(case))
        found.size = size
        found.folder = self._keep / f"{finding.kind}-{[*self.tally.found].index(finding.key)}"
        shutil.rmtree(found.folder, ignore_errors=True)
        found.folder.mkdir(parents=True)
        case.write(found.folder)
        words = f"{case}\n{case.argument!r}\n\n{finding.words}"
        (found.folder / "finding.txt").write_text(words, errors="backslashreplace")
        self._changed(self.tally)


def loaded(name: str) -> type[Target]:
    """Return the class of the target `name` in `fuzzing.readers.TARGETS`, or of `module:class`."""
    from fuzzing.readers import TARGETS

    module, _, kind = TARGETS.get(name, name).partition(":")
    found: type[Target] = getattr(importlib.import_module(module), kind)
    return found
