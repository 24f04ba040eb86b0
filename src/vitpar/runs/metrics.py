"""Metrics and events of a run, read back from its metrics.jsonl: columns of numbers, and rows of `RunFolder.event`.

Rows may lack numbers, or have some that are not finite. Lines that are no rows are counted and left out: a killed run
may leave its last line incomplete.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError

from vitpar.io import open_regular
from vitpar.limits import MAX_COUNT, MAX_MEASURE, MAX_RANKS

Count = Annotated[int, Field(ge=0, le=10**18)]
Column = NDArray[np.float64]
"""Numbers of one metric; NaN where a row has none."""
TRAIN = (
    *("step", "samples", "loss", "lr", "grad_norm", "loss_scale", "step_ms", "data_ms", "images_per_second"),
    *("mfu", "memory_bytes", "skipped", "weight_decay", "drop_path", "image_size", "gpu_utilization", "gpu_watts"),
    "samples_crc32",
)
"""Columns of rows about training steps."""
GROUPED = ("grad_norms", "update_ratios")
"""Objects in rows about training steps, with a number for each group of layers."""
EVAL = ("step", "loss")
"""Columns of rows about evaluations. Those of the task's metrics follow, here and in `TRAIN`."""


@dataclass(frozen=True)
class RunStart:
    """Start of a run, or of its continuation."""

    step: Count
    """Steps that were done before it."""
    model: str
    """Name of the model."""
    parameters: Count
    """Parameters of the global model."""
    plan: str
    """Plan, as a strategy string."""
    device: str
    """Device of rank 0."""
    train_samples: Count
    """Samples of the training set."""
    val_samples: Count
    """Samples of the validation set."""
    steps: Count
    """Steps of the complete run."""
    batch_size: Count
    """Samples of a step."""
    changed: str = ""
    """Settings that differ from those before, in words; empty if there are none."""


_START = TypeAdapter(RunStart)


@dataclass
class RunEvents:
    """Events of a run."""

    starts: list[RunStart] = field(default_factory=list)
    """Starts, the oldest first; none for a run of a vitpar that wrote no events."""
    saves: list[int] = field(default_factory=list)
    """Steps at which checkpoints were saved."""
    end: str = ""
    """Last event that ends a run after the last start: done, stopped, error; empty if there is none."""
    words: str = ""
    """Text of that event."""
    warning: str = ""
    """The newest warning since the last start; empty if there is none."""


@dataclass(frozen=True)
class Metrics:
    """Metrics of a run. The columns of one kind are equally long, and sorted by step."""

    train: Mapping[str, Column]
    """Columns `TRAIN`, those of `GROUPED` as grad_norms/embed, and `hours`: hours of training up to the row, without
    evaluations, saving and pauses."""
    eval: Mapping[str, Column]
    """Columns `EVAL`, `samples` and `hours`; the last two are those of the training row at that step."""
    damaged: int
    """Lines that could not be read."""
    memory: Column
    """Peak memory of each rank in bytes, of the last row that has it; empty if none has."""
    events: RunEvents
    """Events."""

    @property
    def steps(self) -> int:
        """Last step; 0 if there is none."""
        return int(self.train["step"][-1]) if len(self.train["step"]) else 0

    def at(self, axis: str, steps: Column) -> Column:
        """Return the position on an axis, step, samples or hours, after each of `steps`; NaN where it is unknown."""
        known = self.train[axis]
        if axis == "step":
            return steps
        if not len(known) or not np.isfinite(known).any():
            return np.full(len(steps), np.nan)
        fine = np.isfinite(known)
        # 0 steps are 0 samples and 0 hours.
        first = self.train["step"][fine][0] == 1
        x = np.concatenate([np.zeros(int(first)), self.train["step"][fine]])
        return np.interp(steps, x, np.concatenate([np.zeros(int(first)), known[fine]]))


def read_metrics(path: Path, names: Sequence[str] = (), newest: int | None = None) -> Metrics:
    """Return the metrics in the file `path`.

    names: metrics of the task, which rows may have too.
    newest: number of the newest rows that are read, with all events and the newest evaluation; None for all.

    Raises OSError, also for a file that is too large.
    """
    with open_regular(path) as file:
        if newest is None:
            return collect((row_of(line) for line in file if line.strip()), names)
        evaluation, events, lines = list[bytes](), list[bytes](), deque[bytes](maxlen=newest)
        for line in file:
            if b'"event"' in line:
                events.append(line)
            elif b'"eval"' in line:
                evaluation = [line]
            else:
                lines.append(line)
    return collect(map(row_of, [*lines, *evaluation, *events]), names)


def collect(found_rows: Iterable[dict[str, Any] | None], names: Sequence[str] = ()) -> Metrics:
    """Return the metrics of rows. None stands for a line that is no row. names: metrics of the task."""
    kinds = {"train": dict.fromkeys((*TRAIN, *names)), "eval": dict.fromkeys((*EVAL, *names))}
    columns = {kind: {name: array("d") for name in known} for kind, known in kinds.items()}
    events = list[dict[str, Any]]()
    damaged, memory = 0, np.empty(0)
    for row in found_rows:
        kind = row.get("kind") if row is not None else None
        step = _number(row.get("step")) if row is not None else np.nan
        if row is None or not 0 <= step <= MAX_COUNT:
            damaged += 1
        elif "event" in row:
            events.append(row)
        elif isinstance(kind, str) and kind in columns:
            groups = _by_group(row) if kind == "train" else {}
            for name in groups:
                if name not in columns[kind]:
                    columns[kind][name] = array("d", [np.nan] * len(columns[kind]["step"]))
            for name, column in columns[kind].items():
                column.append(_number(groups.get(name, row.get(name))))
            if isinstance(row.get("memory_by_rank"), list):
                memory = np.array([_number(value) for value in row["memory_by_rank"][:MAX_RANKS]])
    train, evals = (_sorted(columns[kind]) for kind in ("train", "eval"))
    step_ms = train["step_ms"]
    fine = np.isfinite(step_ms) & (step_ms >= 0)
    train["hours"] = np.cumsum(np.where(fine, step_ms, 0.0)) / 3.6e6 if fine.any() else np.full(len(step_ms), np.nan)
    collected = Metrics(train, evals, damaged, memory, events_of(events))
    for axis in ("samples", "hours"):
        evals[axis] = collected.at(axis, evals["step"])
    return collected


def _by_group(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of groups of layers in a row, by names such as grad_norms/embed."""
    return {
        f"{key}/{name}": value
        for key in GROUPED
        if isinstance(groups := row.get(key), dict)
        for name, value in groups.items()
    }


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line of JSON; None if the line is none, damaged or hostile."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _number(value: Any) -> float:
    """Return a number of a row, NaN for anything else. Numbers that no chart could show become infinite."""
    if not isinstance(value, int | float):
        return np.nan
    try:
        number = float(value)
    except OverflowError:
        return np.inf
    return number if abs(number) <= MAX_MEASURE else number * np.inf


def _sorted(columns: Mapping[str, array[float]]) -> dict[str, Column]:
    """Return the columns sorted by step; of rows of the same step the last."""
    arrays = {name: np.array(column, dtype=np.float64) for name, column in columns.items()}
    order = np.argsort(arrays["step"], kind="stable")
    steps = arrays["step"][order]
    last = np.append(steps[1:] != steps[:-1], True)[: len(steps)]
    return {name: column[order][last] for name, column in arrays.items()}


def events_of(rows: Iterable[dict[str, Any]]) -> RunEvents:
    """Return the events in rows, in their order. Others than a run writes are left out."""
    found = RunEvents()
    for row in rows:
        event, text, step = row.get("event"), str(row.get("text", "")), row.get("step")
        if event == "start":
            try:
                found.starts.append(_START.validate_python(row))
            except ValidationError:
                continue
            found.end, found.words, found.warning = "", "", ""
        elif event == "save" and isinstance(step, int):
            found.saves.append(step)
        elif event == "warning":
            found.warning = text
        elif event in ("done", "stopped", "error"):
            found.end, found.words = str(event), text
    return found
