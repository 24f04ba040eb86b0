"""Says when a run waits for its images."""

from collections.abc import Sequence
from typing import Any

STEPS = 20  # looked at, after the first, which fills the queue
SHARE = 0.15  # of the time, above which it is worth a word


class InputWatch:
    """workers: decoding threads of a rank. cores: how many a rank has. first: the first step."""

    def __init__(self, workers: int, cores: int, first: int = 1) -> None:
        self._workers, self._cores, self._first = workers, cores, first
        self._steps, self._waited, self._taken, self._said = 0, 0.0, 0.0, False

    def look(self, rows: Sequence[dict[str, Any]]) -> str | None:
        """What to tell the user after these rows of metrics.jsonl; once in a run."""
        for row in rows:
            if row["step"] > self._first:
                self._steps, self._waited = self._steps + 1, self._waited + row["data_ms"]
                self._taken += row["step_ms"]
        if self._said or self._steps < STEPS or self._waited < SHARE * self._taken:
            return None
        self._said = True
        share = f"training waits for images {self._waited / self._taken:.0%} of the time"
        if self._workers < self._cores:
            return f"{share}: raise data.workers (it is {self._workers}, and a rank has {self._cores} cores here)"
        return (
            f"{share}, with {self._workers} decoding threads on {self._cores} cores a rank: pack smaller images "
            "(`vitpar data pack --short-side`), augment less, or give the run more cores"
        )
