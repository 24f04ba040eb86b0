"""Folder of results: ``results.json``, written after every row, and ``report.md`` with its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.first_run import tables
from bench.first_run.parts import PARTS
from bench.json_file import read_json, write_json

HIDDEN = ("cuda",)
"""Facts of a call that the report does not show."""


class Results:
    """Results of all calls that use one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._log = folder / "results.json", folder / "log.txt"
        self._all: dict[str, Any] = read_json(self._path) or {"calls": [], "runs": []}

    @property
    def log(self) -> Path:
        """File to which the output of all programs is appended."""
        return self._log

    def call(self, facts: dict[str, Any]) -> None:
        """Add a call; all later runs belong to it."""
        self._all["calls"].append(facts)
        self._write()

    def keeper(self, part: str, job: str, prediction: str, **more: Any) -> Callable[[dict[str, Any]], None]:
        """Add a run and return a function that updates its state and writes the files.

        more: further facts of the run.
        """
        run = {"part": part, "job": job, "call": len(self._all["calls"]) - 1, "prediction": prediction, **more}
        self._all["runs"].append(run)

        def keep(state: dict[str, Any]) -> None:
            run.update(state)
            self._write()

        keep({"ended": "running", "found": None})
        return keep

    def newest(self, part: str) -> dict[str, dict[str, Any]]:
        """Return for each job of a part its last run with measurements, or its first run if none has any."""
        found: dict[str, dict[str, Any]] = {}
        for run in self._all["runs"]:
            if run["part"] == part and (run["found"] is not None or run["job"] not in found):
                found[run["job"]] = run
        return found

    def report(self) -> str:
        """Return all tables in Markdown."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# First run on a GPU"
        for number, facts in enumerate(self._all["calls"], start=1):
            yield f"\nCall {number}:\n"
            yield from (f"- {name}: {value}" for name, value in facts.items() if name not in HIDDEN)
        for name, part in PARTS.items():
            if runs := self.newest(name):
                yield f"\n## {name}: {part.what}\n"
                yield from tables.lines(name, runs)

    def _write(self) -> None:
        write_json(self._path, self._all)
        half = self.folder / "report.md.partial"
        half.write_text(self.report())
        half.replace(self.folder / "report.md")
