"""Reporter that passes what a run logs to the trackers of its recipe."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from vitpar.io import read_json, write_text
from vitpar.recipe import Recipe
from vitpar.strategy.plan_json import plan_to_json
from vitpar.training.events import Reporter, Row, RunHeader
from vitpar.training.run_folder import RunFolder
from vitpar.training.tracking.tracked_run import TrackedRun
from vitpar.training.tracking.tracker import Tracker

TRACK_FILE = "track.json"
"""File of a run's folder with its identifier for trackers and the trackers that it has used."""
FLUSH_S = 10.0
"""Seconds that the end of a run waits for its trackers."""
PREFIXES = {"train": "train", "eval": "val"}
"""First part of the names of logged numbers, by the kind of the row of metrics.jsonl."""
_ID = re.compile("[a-z0-9]{1,64}")
"""Identifiers that are accepted from a run's folder: trackers name files by them."""


def scalars(row: Row) -> dict[str, float]:
    """Return the measured numbers of a row of metrics.jsonl by trackers' names: train/loss, train/grad_norms/head."""
    prefix = PREFIXES[row["kind"]]
    values = {key: value for key, value in row.items() if key not in ("kind", "step", "samples_crc32")}
    for key in [key for key, value in values.items() if isinstance(value, dict)]:
        values |= {f"{key}/{group}": value for group, value in values.pop(key).items()}
    return {f"{prefix}/{key}": value for key, value in values.items() if isinstance(value, int | float)}


class Tracked(Reporter):
    """Reporter that passes the rows that are reported to trackers, and everything to `shown`. A context manager.

    Without trackers it only passes on. At the end of the context trackers get `FLUSH_S` seconds to write what is left.
    Their problems are warnings.

    recipe: names the trackers.
    folder: folder of the run, which has begun.
    done: step after which the run resumes; 0 for a new run.
    """

    def __init__(self, shown: Reporter, recipe: Recipe, folder: RunFolder, done: int = 0) -> None:
        self._shown, self._recipe, self._folder, self._done = shown, recipe, folder, done
        self._trackers: list[Tracker] = []
        self._step = done

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error_type is not None)

    def started(self, header: RunHeader) -> None:
        self._shown.started(header)
        track = self._recipe.track
        if not track.trackers:
            return
        run_id, before = _identity(self._folder.path, track.trackers)
        for name in track.trackers:
            run = TrackedRun(
                folder=str(self._folder.path.resolve()),
                id=run_id,
                name=track.name or self._folder.path.resolve().name,
                project=track.project,
                online=track.wandb_mode == "online",
                done=self._done,
                tracked=self._folder.logged if name in before else 0,
                resumed=name in before,
                recipe=self._recipe.model_dump(mode="json"),
                facts=_facts(header, self._folder.environment),
                texts=self._folder.texts,
            )
            self._trackers.append(Tracker(name, run))

    def stepped(self, row: Row) -> None:
        self._put(row["step"], scalars(row))
        self._shown.stepped(row)

    def evaluating(self, images: int, total: int) -> None:
        self._shown.evaluating(images, total)

    def evaluated(self, row: Row) -> None:
        self._put(row["step"], scalars(row))
        self._shown.evaluated(row)

    def note(self, text: str) -> None:
        self._shown.note(text)

    def info(self, text: str) -> None:
        self._shown.info(text)

    def finished(self, summary: Row) -> None:
        numbers = {f"summary/{key}": value for key, value in summary.items() if isinstance(value, int | float)}
        self._put(self._step, numbers)
        self._close(failed=False)  # before the summary, since warnings come first
        self._shown.finished(summary)

    def _put(self, step: int, values: Mapping[str, float]) -> None:
        """Queue numbers for all trackers, and report their problems."""
        self._step = step
        for tracker in self._trackers:
            tracker.put(step, values)
        self._report()

    def _close(self, failed: bool) -> None:
        deadline = time.monotonic() + FLUSH_S
        for tracker in self._trackers:
            tracker.close(failed)
        for tracker in self._trackers:
            tracker.join(deadline)
        self._report()
        self._trackers = []

    def _report(self) -> None:
        for tracker in self._trackers:
            if problem := tracker.problem():
                self._shown.note(problem)


def _facts(header: RunHeader, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return model, data, plan and hardware of a run as JSON values."""
    return {
        "model": {"name": header.config.name, "parameters": header.parameters},
        "data": {"train_images": header.train_samples, "val_images": header.val_samples, "steps": header.steps},
        "plan": plan_to_json(header.plan),
        "hardware": {**environment, "device": header.device, "ranks": header.plan.world_size},
    }


def _identity(folder: Path, trackers: Sequence[str]) -> tuple[str, list[str]]:
    """Return the identifier of the run in `folder` for trackers, and the trackers that it has used before."""
    path = folder / TRACK_FILE
    run_id, before = secrets.token_hex(4), list[str]()
    with suppress(OSError, ValueError, KeyError, TypeError):  # new, or damaged
        record = read_json(path)
        before = [*record["trackers"]]
        run_id = _ID.fullmatch(record["id"])[0]  # type: ignore[index]
    with suppress(OSError):  # then a resumed run is a new one for the trackers
        write_text(path, json.dumps({"id": run_id, "trackers": sorted({*before, *trackers})}))
    return run_id, before
