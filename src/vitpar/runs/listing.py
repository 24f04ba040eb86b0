"""Summaries of the runs in a folder, made without parsing every row of their metrics."""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitpar.errors import DataError
from vitpar.runs.folder import LOG, METRICS, RunRecord, RunState
from vitpar.runs.lines import lines_of, row_of
from vitpar.tasks import Metric
from vitpar.text import shown

RECENT = 200
"""Number of the newest rows whose mean rate is shown."""


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
    summaries = [_summary_or_error(RunRecord(path)) for path in places]
    return sorted(summaries, key=lambda run: (run.age_seconds, run.name))


def _summary_or_error(run: RunRecord) -> RunSummary:
    """Return the summary of a run, or one that says why it cannot be read."""
    try:
        return summary(run)
    except DataError as error:
        return RunSummary(run.name, "failed", "?", 0, None, None, None, None, None, run.age_seconds, str(error))


def summary(run: RunRecord) -> RunSummary:
    """Return the summary of a run. Metrics that cannot be read are left out.

    Raises DataError for a log that cannot be read.
    """
    evaluation: dict[str, Any] = {}
    newest: deque[bytes] = deque(maxlen=RECENT)
    with suppress(OSError):
        for line in filter(None, lines_of(run.path / METRICS)):
            if b'"eval"' in line:
                evaluation = row_of(line) or evaluation
            else:
                newest.append(line)
    rows = [row for row in map(row_of, newest) if row is not None and row.get("kind") == "train"]
    steps = [int(step) for row in rows if (step := _finite(row.get("step"))) is not None]
    losses = [loss for row in rows if (loss := _finite(row.get("loss"))) is not None]
    rates = [rate for row in rows if (rate := _finite(row.get("images_per_second"))) is not None and rate > 0]
    loss = _finite(evaluation.get("loss"))
    metric = next(iter(run.task_metrics), None)
    value = None if metric is None else _finite(evaluation.get(metric.name))
    return RunSummary(
        run.name,
        run.state,
        run.plan_words,
        max(steps, default=0),
        run.total_steps,
        loss if loss is not None else losses[-1] if losses else None,
        metric,
        value,
        len(rates) / sum(1 / rate for rate in rates) if rates else None,
        run.age_seconds,
        run.note,
    )


def _finite(value: Any) -> float | None:
    """Return a finite number, None for anything else."""
    with suppress(OverflowError):
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None
