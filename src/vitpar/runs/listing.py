"""Summaries of the runs in a folder, made without all rows of their metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vitpar.errors import DataError
from vitpar.runs.folder import LOG, RunRecord, RunState
from vitpar.tasks import Metric
from vitpar.text import shown

RECENT = 200
"""Number of the newest rows that are read: their mean rate is shown."""


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run."""

    name: str
    """Name of its folder."""
    state: RunState
    """State."""
    plan: str
    """Plan, as a strategy string; a question mark if it is unknown."""
    steps: int
    """Steps done."""
    total_steps: int | None
    """Steps of the complete run; None if they are unknown."""
    loss: float | None
    """Loss of the last evaluation, or else of the last step; None if there is neither."""
    metric: Metric | None
    """The task's first metric; None if it has none."""
    value: float | None
    """Its value in the last evaluation; None without one."""
    images_per_second: float | None
    """Mean rate over the newest rows; None if they have none."""
    age_seconds: float
    """Seconds since the log was last written."""
    note: str
    """Sentence on the run's end, or its last warning; empty if there is none."""


def runs_in(folder: Path) -> list[RunSummary]:
    """Return the summaries of the runs in `folder`, the newest first; of `folder` itself if it is a run.

    Raises DataError if there is no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{shown(folder)}': name one that holds runs")
    places = [folder] if (folder / LOG).is_file() else [path for path in folder.iterdir() if (path / LOG).is_file()]
    summaries = [_summary(RunRecord(path, newest=RECENT)) for path in places]
    return sorted(summaries, key=lambda run: (run.age_seconds, run.name))


def _summary(run: RunRecord) -> RunSummary:
    """Return the summary of a run, or one that says why its log cannot be read."""
    try:
        state, plan, total_steps, note = run.state, run.plan_words, run.total_steps, run.note
    except DataError as error:
        return RunSummary(run.name, "failed", "?", 0, None, None, None, None, None, run.age_seconds, str(error))
    loss, metric = run.last("loss"), next(iter(run.task_metrics), None)
    return RunSummary(
        run.name,
        state,
        plan,
        run.metrics.steps,
        total_steps,
        run.last("loss", "train") if loss is None else loss,
        metric,
        metric and run.last(metric.name),
        run.images_per_second,
        run.age_seconds,
        note,
    )
