"""Readers of a run's folder."""

import json
from pathlib import Path
from typing import Any


def rows_of(folder: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of one kind, in order."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == kind]


def losses_of(folder: Path) -> list[float]:
    """Return the training loss of every logged step."""
    return [row["loss"] for row in rows_of(folder)]
