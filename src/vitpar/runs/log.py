"""Events of a run, read back from its log.txt.

The lines are those of ``vitpar.training.events``, ``vitpar.training.trainer`` and ``vitpar.training.saving.saver``. A
test trains, stops and resumes a run, and reads all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from vitpar.runs.lines import lines_of

_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)")
_START = re.compile(
    r"start  (?P<model>.+?), (?P<parameters>[\d,]+) parameters, (?P<plan>.+) on (?P<device>\S+), "
    r"(?P<train>[\d,]+) training \w+, (?P<val>[\d,]+) validation \w+, "
    r"(?P<steps>[\d,]+) steps of batch size (?P<batch>[\d,]+)"
)
_RESUMED = re.compile(r"resuming from .+: (\d{1,18}) steps? done")
_CHANGED = "changed settings: "
_SAVED = re.compile(r"saving step ([\d,]{1,24}): ")
_STOPPED = re.compile(r"stopped by (.+) after step ([\d,]{1,24}): ")
_LONGEST = 4096
"""Characters of a line that are looked at."""
MOST_WARNINGS = 20
"""Number of the newest warnings that are kept."""


@dataclass(frozen=True)
class RunStart:
    """Start of a run, or of its continuation."""

    after: int
    """Steps that were done before it."""
    changed: str
    """Settings that differ from those before, in words; empty if there are none."""
    model: str
    """Name of the model."""
    parameters: int
    """Parameters of the global model."""
    plan: str
    """Plan, as a strategy string."""
    device: str
    """Device of rank 0."""
    train_images: int
    """Images of the training set."""
    val_images: int
    """Images of the validation set."""
    steps: int
    """Steps of the complete run."""
    batch_size: int
    """Images of a step."""


@dataclass
class RunLog:
    """Events of a run."""

    starts: list[RunStart] = field(default_factory=list)
    """Starts, the oldest first."""
    saves: list[int] = field(default_factory=list)
    """Steps at which checkpoints were saved, without those that a resumed run repeated."""
    end: str = ""
    """Last word of the log after the last start: done, stopped, error; empty if there is none."""
    words: str = ""
    """Text of the line of `end`."""
    warnings: list[str] = field(default_factory=list)
    """The newest warnings since the last start."""


def read_log(path: Path) -> RunLog:
    """Return the events in the log file `path`.

    Raises OSError.
    """
    run_log, resumed, changed = RunLog(), 0, ""
    for text in _texts(path):
        if said := _RESUMED.match(text):
            resumed = int(said[1])
            run_log.saves = [step for step in run_log.saves if step <= resumed]
        elif text.startswith(_CHANGED):
            changed = text.removeprefix(_CHANGED)
        elif said := _START.fullmatch(text):
            model, plan, device = said["model"], said["plan"], said["device"]
            counts = (_count(said[name]) for name in ("train", "val", "steps", "batch"))
            parameters = _count(said["parameters"])
            run_log.starts.append(RunStart(resumed, changed, model, parameters, plan, device, *counts))
            run_log.end, run_log.words, run_log.warnings, resumed, changed = "", "", [], 0, ""
        elif said := _SAVED.match(text):
            run_log.saves.append(_count(said[1]))
        elif said := _STOPPED.match(text):
            run_log.end, run_log.words = "stopped", f"stopped by {said[1]} after step {said[2]}"
        elif text.startswith("done  "):
            run_log.end, run_log.words = "done", ""
        elif text.startswith("error: "):
            run_log.end, run_log.words = "error", text.removeprefix("error: ")
        elif text.startswith("warning: "):
            run_log.warnings = [*run_log.warnings, text.removeprefix("warning: ")][-MOST_WARNINGS:]
    return run_log


def _texts(path: Path) -> Iterator[str]:
    """Yield the text of every line without its date, cut to `_LONGEST` characters."""
    for line in lines_of(path):
        if said := _LINE.match(line[:_LONGEST].decode("utf-8", "replace").rstrip("\n")):
            yield said[1]


def _count(text: str) -> int:
    return int(text.replace(",", "")[:18] or 0)
