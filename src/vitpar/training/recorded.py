"""Reporter that records a run in its folder and with the trackers of its recipe."""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from vitpar.io import read_json, write_text
from vitpar.recipe import Recipe
from vitpar.strategy.plan_json import plan_to_json
from vitpar.tasks import Task
from vitpar.training.events import Reporter, Row, RunHeader
from vitpar.training.run_folder import RunFolder
from vitpar.training.tracking import TrackedRun, Tracker

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


class Recorded(Reporter):
    """Reporter that writes events to the log.txt of `folder`, warnings and the end also to its metrics.jsonl.

    It passes all events on to `shown`, and from `started` on the rows that are reported to the trackers of the recipe.
    A context manager: at its end trackers get `FLUSH_S` seconds to write what is left. Their problems are warnings.
    """

    def __init__(self, folder: RunFolder, recipe: Recipe, task: Task, shown: Reporter) -> None:
        self._folder, self._recipe, self._task, self._shown = folder, recipe, task, shown
        self._trackers: list[Tracker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        self._close(failed=error_type is not None)

    def started(self, header: RunHeader) -> None:
        sample = self._task.SAMPLE
        self._folder.log(
            f"start  {header.config.name}, {header.parameters:,} parameters, {header.plan} on {header.device}, "
            f"{header.train_samples:,} training {sample}s, {header.val_samples:,} validation {sample}s, "
            f"{header.steps:,} steps of batch size {header.recipe.train.batch_size:,}"
        )
        self._shown.started(header)
        self._step, track, folder = self._folder.step, self._recipe.track, self._folder.path.resolve()
        if not track.trackers:
            return
        run_id, before = _identity(folder, track.trackers)
        facts = {
            "model": {"name": header.config.name, "parameters": header.parameters},
            "data": {"train_images": header.train_samples, "val_images": header.val_samples, "steps": header.steps},
            "plan": plan_to_json(header.plan),
            "hardware": {**self._folder.environment, "device": header.device, "ranks": header.plan.world_size},
        }
        for name in track.trackers:
            run = TrackedRun(
                folder=str(folder),
                id=run_id,
                name=track.name or folder.name,
                project=track.project,
                online=track.wandb_mode == "online",
                done=self._folder.step,
                tracked=self._folder.logged if name in before else 0,
                resumed=name in before,
                recipe=self._recipe.model_dump(mode="json"),
                facts=facts,
                texts=self._folder.texts,
            )
            self._trackers.append(Tracker(name, run))

    def stepped(self, row: Row) -> None:
        self._put(row["step"], scalars(row))
        loss, norm = (float("nan") if row[key] is None else row[key] for key in ("loss", "grad_norm"))
        scale = f"scale {row['loss_scale']:,.10g}  " if "loss_scale" in row else ""
        measured = self._task.training_words(row)
        measured = measured and f"{measured}  "
        self._folder.log(
            f"step {row['step']:,}  loss {loss:.4f}  {measured}lr {row['lr']:.3g}  grad norm {norm:.3g}  {scale}"
            f"{row['images_per_second']:,.1f} {self._task.SAMPLE}s/s  step {row['step_ms']:,.1f} ms  "
            f"data {row['data_ms']:,.1f} ms"
        )
        self._shown.stepped(row)

    def evaluating(self, images: int, total: int) -> None:
        self._shown.evaluating(images, total)

    def evaluated(self, row: Row) -> None:
        self._put(row["step"], scalars(row))
        self._folder.log(f"eval {row['step']:,}  val {self._task.words(row)}")
        self._shown.evaluated(row)

    def note(self, text: str) -> None:
        self._folder.log(f"warning: {text}")
        self._folder.event("warning", text=text)
        self._shown.note(text)

    def info(self, text: str) -> None:
        self._folder.log(text)
        self._shown.info(text)

    def finished(self, summary: Row) -> None:
        numbers = {f"summary/{key}": value for key, value in summary.items() if isinstance(value, int | float)}
        self._put(self._step, numbers)
        self._close(failed=False)  # before the summary, since warnings come first
        result = f"val {self._task.words(summary)}" if self._task.best.name in summary else "not evaluated"
        self._folder.log(f"done  {result}  weights {summary['weights']}")
        self._folder.event("done")
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
                self.note(problem)


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
