"""Execution of a step's programs with time limits, keeping the measurements made so far."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.gpu_state import sample
from bench.header import without_folders
from bench.json_file import read_json
from bench.programme.programmes import DATA, MINUTES, RESULT, ROOT, RUN, WORK, Job
from bench.programme.results import Results

POLL_S = 0.3
SAMPLE_S = 10.0
"""Seconds between two samples of the GPU's clock."""
GRACE_S = 5.0
"""Seconds that a program has after an interrupt to write its results."""
LONGEST = 200
"""Characters of a line that are printed."""
TAIL = 15
"""Last lines of a failed program that are kept."""


class Running:
    """A program in a separate process group. Its output is appended to the log and printed, cut to LONGEST."""

    def __init__(self, job: Job, results: Results, data: Path, limit: float, rehearsal: bool) -> None:
        self.job = job
        self._result = results.file(job) if job.reads != "run" else results.run(job) / "metrics.jsonl"
        self._result.unlink(missing_ok=True)
        self._lines: list[str] = []
        self._begun, self._limit = time.monotonic(), limit
        self.ended, self._seconds = "running", 0.0
        given = {RESULT: results.file(job), DATA: data, MINUTES: f"{(limit - GRACE_S) / 60:.2f}"}
        given |= {RUN: results.run(job)}
        words = [str(given.get(word, word)).replace(WORK, str(results.folder)) for word in job.command]
        self._process = subprocess.Popen(
            [sys.executable, *words, *(job.rehearsal if rehearsal else ())],
            cwd=ROOT,
            env=os.environ | job.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(results.log,), daemon=True)
        self._reader.start()

    def look(self) -> bool:
        """Return whether the program still runs; stop it at its time limit."""
        if self.ended != "running":
            return False
        late = time.monotonic() - self._begun > self._limit
        if self._process.poll() is None and not late:
            return True
        self.stop("stopped at its time limit" if late else "")
        return False

    def stop(self, why: str) -> None:
        """End the program and all that it started. why: shown in the report; empty for its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(GRACE_S)
        self._seconds = time.monotonic() - self._begun
        code = self._process.returncode
        self.ended = why or ("ended" if code == 0 else f"exit code {code}")

    def state(self, gpu: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the measurements so far. gpu: samples of the GPU meanwhile."""
        readers = {"file": read_json, "junit": outcomes, "run": evaluations}
        read = readers.get(self.job.reads)
        lines = list(self._lines)
        failed = self.ended not in ("ended", "running")
        return {
            "ended": self.ended,
            "seconds": round(self._seconds or time.monotonic() - self._begun, 1),
            "found": read(self._result) if read else last_json(lines),
            "gpu": gpu,
            "last_lines": lines[-TAIL:] if failed else [],
        }

    def _read(self, log: Path) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(without_folders(line.rstrip("\n")))
            with log.open("a") as file:  # one write a line: programs of a step share the file
                file.write(f"{self.job.name}: {line}")
            print(f"  {self.job.name}: {line.rstrip()[:LONGEST]}", flush=True)


def run_step(jobs: Sequence[Job], results: Results, data: Path, patience: float = 1) -> bool:
    """Run the programs of a step at once and keep their measurements; return whether all succeeded.

    data: CIFAR-10. patience: factor of the time limits; above 1 in a rehearsal on the CPU.
    """
    started = [
        (
            Running(job, results, data, patience * job.limit, rehearsal=patience > 1),
            results.keeper(job),
            list[dict[str, Any]](),
        )
        for job in jobs
    ]
    sampled = time.monotonic()
    try:
        while busy := [one for one in started if one[0].look()]:
            time.sleep(POLL_S)
            if time.monotonic() - sampled > SAMPLE_S:
                sampled, now = time.monotonic(), sample()
                for running, keep, gpu in busy:
                    gpu += [now] if now else []
                    keep(running.state(gpu))
    finally:
        for running, keep, gpu in started:
            if running.look():
                running.stop("stopped with the call")
            keep(running.state(gpu))
    return all(running.ended == "ended" for running, _, _ in started)


def last_json(lines: list[str]) -> Any:
    """Return the last line that is a JSON object, or None."""
    for line in reversed(lines):
        if line.startswith("{"):
            with suppress(ValueError):
                return json.loads(line)
    return None


def evaluations(path: Path) -> dict[str, Any] | None:
    """Return the evaluations of a training so far with its newest samples/s, from its metrics."""
    if not path.exists():
        return None
    rows = []
    for line in path.read_text().splitlines():
        with suppress(ValueError):  # the last line may be incomplete
            rows.append(json.loads(line))
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    passed = [(at - times[0]).total_seconds() for at in times]
    found = [row | {"seconds": since} for row, since in zip(rows, passed, strict=True) if row["kind"] == "eval"]
    rates = [row["images_per_second"] for row in rows if row["kind"] == "train"]
    return {"evaluations": found, "images_per_second": rates[-1] if rates else None}


def outcomes(path: Path) -> dict[str, Any] | None:
    """Return the number of tests by outcome, and failed tests with their message, from pytest's XML file."""
    try:
        cases = list(xml.parse(path).iter("testcase"))
    except (OSError, xml.ParseError):
        return None
    found = {case.get("name", ""): next(iter(case), None) for case in cases}
    counts = Counter("passed" if why is None or why.tag.startswith("system") else why.tag for why in found.values())
    bad = {
        name: why.get("message", "")
        for name, why in found.items()
        if why is not None and why.tag in ("failure", "error")
    }
    return {"counts": dict(counts), "failed": bad}
