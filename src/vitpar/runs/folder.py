"""A run's folder, read back without torch: state, recipe, plan, environment, metrics and events.

Files of a run may be damaged or come from a stranger. What cannot be read is left out, with a note.
"""

from __future__ import annotations

import fcntl
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitpar.errors import DataError, StrategyError
from vitpar.io import open_regular, read_json, read_toml
from vitpar.runs.metrics import Metrics, RunEvents, collect, read_metrics
from vitpar.strategy import Plan
from vitpar.strategy.plan_json import read_plan
from vitpar.tasks import Metric
from vitpar.tasks.classify import Classify
from vitpar.text import shown

LOG, METRICS = "log.txt", "metrics.jsonl"
"""Files that every run has from its start."""
RunState = Literal["running", "complete", "stopped", "failed"]
"""State of a run: a process trains it; it reached its last step; it was asked to stop; it ended otherwise."""
RECENT = 200
"""Number of the newest rows of metrics that a list of runs reads: their mean rate is shown."""
SEED = "train.seed"
WARM_UP_ROWS = 1
"""Rows that are left out of the mean rate, as in ``vitpar.training.metrics``."""


def refuse_other_folders(path: Path) -> None:
    """Raise DataError unless `path` is the folder of a run."""
    if not path.is_dir():
        raise DataError(f"there is no run '{shown(path)}': name a folder such as runs/mine, see `vitpar runs`")
    if not (path / LOG).is_file():
        raise DataError(f"'{shown(path)}' is not the folder of a run ({LOG} is missing): see `vitpar runs`")


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder when its parts are first used.

    Reading all rows raises DataError for metrics that cannot be read.
    """

    path: Path
    """Folder of the run."""
    newest: int | None = None
    """Number of the newest rows of metrics to read, for a list of runs, in which one that cannot be read counts as
    failed; None for all rows."""

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name or str(self.path)

    @cached_property
    def metrics(self) -> Metrics:
        """Metrics and events of the run."""
        names = [metric.name for metric in self.task_metrics]
        try:
            return read_metrics(self.path / METRICS, names, self.newest)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                return collect((), names)
            words = f"cannot read '{self.path / METRICS}': {error.strerror}"
            if self.newest:
                return collect([{"event": "error", "step": 0, "text": words}], names)
            raise DataError(f"{words}: name another run") from None

    @property
    def events(self) -> RunEvents:
        """Events of the run."""
        return self.metrics.events

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """Versions, hardware and command of env.json; empty if it cannot be read."""
        return _readable(self.path / "env.json", read_json)

    @cached_property
    def task_metrics(self) -> tuple[Metric, ...]:
        """Metrics of the task, as env.json describes them; those of classification if it does not."""
        described = self.environment.get("metrics")
        if not isinstance(described, list):
            return Classify.METRICS
        known = [metric for one in described if (metric := Metric.read(one))]
        return tuple({metric.name: metric for metric in known}.values())

    @cached_property
    def recipe(self) -> Mapping[str, Any]:
        """Settings of recipe.toml by dotted key; empty if it cannot be read."""
        return {
            f"{name}.{key}": value
            for name, section in _readable(self.path / "recipe.toml", read_toml).items()
            if isinstance(section, dict)
            for key, value in section.items()
        }

    @cached_property
    def plan(self) -> Plan | None:
        """Plan of plan.json; None if it cannot be read."""
        try:
            return read_plan(self.path / "plan.json")
        except (StrategyError, OSError):
            return None

    @cached_property
    def state(self) -> RunState:
        """State of the run."""
        if self.events.end == "stopped":
            return "stopped"
        if self.events.end == "done" or (not self.events.starts and (self.path / "weights").is_dir()):
            return "complete"
        return "running" if self.events.end == "" and is_locked(self.path / LOG) else "failed"

    @property
    def plan_words(self) -> str:
        """Plan as a strategy string; a question mark if nothing says it."""
        if self.events.starts:
            return self.events.starts[-1].plan
        return "?" if self.plan is None else str(self.plan)

    @property
    def total_steps(self) -> int | None:
        """Steps of the complete run; None if no event says it."""
        return self.events.starts[-1].steps if self.events.starts else None

    @property
    def note(self) -> str:
        """Sentence on the run's end: its error, or its last warning; empty if there is none."""
        events = self.events
        if events.end in ("error", "stopped"):
            return events.words
        if not events.starts and self.metrics.steps:
            return "an earlier vitpar trained it, which wrote no events: its restarts, saves and warnings are unknown"
        if self.state == "failed":
            return "it ended without a message: was it killed?"
        return events.warning

    @property
    def age_seconds(self) -> float:
        """Seconds since the log was last written."""
        with suppress(OSError):
            return max(0.0, time.time() - (self.path / LOG).stat().st_mtime)
        return 0.0

    @property
    def images_per_second(self) -> float | None:
        """Mean rate over all steps but the first; None if no step has one."""
        rates = self.metrics.train["images_per_second"][WARM_UP_ROWS:]
        rates = rates[np.isfinite(rates) & (rates > 0)]
        return float(len(rates) / (1 / rates).sum()) if len(rates) else None

    def last(self, name: str, kind: Literal["train", "eval"] = "eval") -> float | None:
        """Return the last finite value of a column of the metrics; None if there is none."""
        values = (self.metrics.train if kind == "train" else self.metrics.eval)[name]
        fine = values[np.isfinite(values)]
        return float(fine[-1]) if len(fine) else None

    @property
    def loss(self) -> float | None:
        """Loss of the last evaluation, or else of the last step; None if there is neither."""
        loss = self.last("loss")
        return self.last("loss", "train") if loss is None else loss

    @property
    def metric(self) -> Metric | None:
        """First metric of the task; None if it has none."""
        return next(iter(self.task_metrics), None)

    @property
    def commands(self) -> dict[int, str]:
        """Commands that started and resumed the run, by the steps done before; none if it was started from Python."""
        found = self.environment.get("commands", [[0, self.environment.get("command")]])
        pairs = [pair for pair in found if isinstance(pair, list) and len(pair) == 2] if isinstance(found, list) else []
        return {
            after: shlex.join(["vitpar", *map(str, words[1:])])
            for after, words in pairs
            if isinstance(after, int) and isinstance(words, list) and words
        }

    @property
    def repeating_command(self) -> str:
        """Command that repeats the run from its saved recipe and plan."""
        words = ["vitpar", "train", "--recipe", str(self.path / "recipe.toml"), "--mesh", str(self.path / "plan.json")]
        for option in ("model", "task"):
            name = self.recipe.get(f"{option}.name")
            words += [f"--{option}", name] if isinstance(name, str) and ".py:" in name else []
        return shlex.join(words)

    def stamp(self) -> str:
        """Return a text that changes when the run's log or metrics do."""
        stamps = []
        for name in (LOG, METRICS):
            with suppress(OSError):
                status = (self.path / name).stat()
                stamps.append(f"{status.st_size}-{status.st_mtime_ns}")
        return "-".join(stamps)


def runs_in(folder: Path) -> list[RunRecord]:
    """Return the runs in `folder` with their newest metrics, the newest first; `folder` itself if it is a run.

    Raises DataError if there is no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{shown(folder)}': name one that holds runs")
    places = [folder] if (folder / LOG).is_file() else [path for path in folder.iterdir() if (path / LOG).is_file()]
    return sorted((RunRecord(path, newest=RECENT) for path in places), key=lambda run: (run.age_seconds, run.name))


def summary(run: RunRecord) -> dict[str, Any]:
    """Return the state and newest numbers of a run as `vitpar runs --json` prints them; None for what is unknown."""
    metric = run.metric
    return {
        "name": run.name,
        "state": run.state,
        "model": run.recipe.get("model.name"),
        "data": run.recipe.get("data.path"),
        "plan": run.plan_words,
        "steps": run.metrics.steps,
        "total_steps": run.total_steps,
        "loss": run.loss,
        "metric": metric and asdict(metric),
        "value": metric and run.last(metric.name),
        "images_per_second": run.images_per_second,
        "age_seconds": run.age_seconds,
        "note": run.note,
    }


def _readable(path: Path, read: Callable[[Path], object]) -> dict[str, Any]:
    """Return the object in a file; an empty one if it cannot be read or holds something else."""
    with suppress(OSError, ValueError):
        content = read(path)
        return content if isinstance(content, dict) else {}
    return {}


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a run's log, which it does as long as it trains.

    The lock is tried for an instant. Only runs whose log has no end are asked, so no run that starts is disturbed.
    """
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a mount without locks
        return False
    return False


def seed_groups(runs: Sequence[RunRecord]) -> list[list[int]]:
    """Return the numbers of runs that differ in `train.seed` alone, in groups of two seeds or more."""
    groups: dict[str, list[int]] = {}
    for number, run in enumerate(runs):
        others = sorted((key, str(value)) for key, value in run.recipe.items() if key != SEED)
        groups.setdefault(repr(others) if others else f"{number}", []).append(number)
    return [group for group in groups.values() if len({str(runs[number].recipe.get(SEED)) for number in group}) > 1]
