"""The runs in a folder, and a summary of each."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitpar.errors import DataError
from vitpar.runs.folder import LOG, RunRecord
from vitpar.text import shown

RECENT = 200
"""Number of the newest rows of metrics that are read: their mean rate is shown."""


def runs_in(folder: Path) -> list[RunRecord]:
    """Return the runs in `folder` with their newest metrics, the newest first; `folder` itself if it is a run.

    Raises DataError if there is no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder '{shown(folder)}': name one that holds runs")
    places = [folder] if (folder / LOG).is_file() else [path for path in folder.iterdir() if (path / LOG).is_file()]
    return sorted((RunRecord(path, newest=RECENT) for path in places), key=lambda run: (run.age_seconds, run.name))


def summary(run: RunRecord) -> dict[str, Any]:
    """Return the state and the newest numbers of a run as JSON; None for what is unknown."""
    metric = run.metric
    return {
        "name": run.name,
        "state": run.state,
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
