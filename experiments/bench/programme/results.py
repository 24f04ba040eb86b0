"""Folder of results of a call: ``results.json``, written after every row, ``report.md`` and ``log.txt``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.json_file import read_json, write_json
from bench.programme.programmes import Job


class Results:
    """Results of one or more calls that use one folder."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log.txt"
        """File to which the output of all programs is appended."""
        self._path = self.folder / "results.json"
        self._all: dict[str, Any] = read_json(self._path) or {"calls": [], "runs": []}
        self._all["calls"].append(facts)
        self._write()

    def file(self, job: Job) -> Path:
        """Return the file that a job writes its measurements to."""
        return self.folder / f"{_slug(job)}.json"

    def run(self, job: Job) -> Path:
        """Return the folder of a job that is a training."""
        return self.folder / _slug(job)

    def keeper(self, job: Job) -> Callable[[dict[str, Any]], None]:
        """Add a run of `job` and return a function that updates its state and writes the file."""
        run = {"job": job.name, "call": len(self._all["calls"]) - 1, "prediction": job.prediction}
        self._all["runs"].append(run)

        def keep(state: dict[str, Any]) -> None:
            run.update(state)
            self._write()

        keep({"ended": "running", "found": None})
        return keep

    def _write(self) -> None:
        write_json(self._path, self._all)


def _slug(job: Job) -> str:
    return re.sub("[^a-z0-9]+", "-", job.name.lower()).strip("-")


def merged(folders: list[Path]) -> dict[str, Any]:
    """Return the calls and runs of several folders as one. Of runs of one job, the last with measurements counts."""
    calls: list[Any] = []
    runs: dict[str, dict[str, Any]] = {}
    for folder in folders:
        found = read_json(folder / "results.json")
        if found is None:
            raise ValueError(f"{folder} has no results.json: name the folder that a call wrote to")
        for run in found["runs"]:
            if run["found"] is not None or run["job"] not in runs:
                runs[run["job"]] = {**run, "call": run["call"] + len(calls)}
        calls += found["calls"]
    return {"calls": calls, "runs": list(runs.values())}
