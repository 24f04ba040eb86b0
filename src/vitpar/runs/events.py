"""Events of a run: the rows of its metrics.jsonl that ``vitpar.training.run_folder.RunFolder.event`` writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=0, le=10**18)]


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
