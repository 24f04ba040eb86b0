"""Execution of a program with a time limit, keeping the measurements made so far."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from bench.first_run.parts import ROOT, Job, argv, environment
from bench.gpu_state import sample
from bench.json_file import read_json

POLL_S = 0.5
SAMPLE_S = 15.0
"""Seconds between two samples of the GPU's clock."""
GRACE_S = 5.0
"""Seconds that a program has after an interrupt to print its results."""
LONGEST = 500
"""Characters of a line that are printed: the JSON of a check has thousands."""
TAIL = 15
"""Last lines of a failed program that are kept."""
_PLAIN = re.compile(r"^(\S+\.py::.*?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_XDIST = re.compile(r"^\[gw\d+\].*?\b(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS) (\S+\.py::.*)$")
_REASON = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.*?) - (.*)$")


class Running:
    """A program in a separate process group. Its output is appended to `log` and printed line by line."""

    def __init__(self, job: Job, seconds: float, result: Path, log: Path) -> None:
        self._job, self._result = job, result
        self._lines: list[str] = []
        self._samples: list[dict[str, Any]] = []
        self._begun, self._end = time.monotonic(), time.monotonic() + seconds
        self._process = subprocess.Popen(
            argv(job, result, seconds / 60),
            cwd=ROOT,
            env=environment() | job.environment | _writable_home(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, args=(log,), daemon=True)
        self._reader.start()

    def wait(self, kept: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Wait until the program ends or reaches its time limit; return its measurements and how it ended.

        kept: called with the same dict whenever there are new measurements.
        """
        before, looked = "", 0.0
        try:
            while self._process.poll() is None and time.monotonic() < self._end:
                time.sleep(POLL_S)
                if time.monotonic() - looked > SAMPLE_S:
                    looked = time.monotonic()
                    self._samples += filter(None, [sample()])
                found = self._found("running")
                if (text := json.dumps(found["found"])) != before:
                    before = text
                    kept(found)
            ended = "ended" if self._process.poll() is not None else "stopped at its time limit"
        finally:
            self._kill()
        self._reader.join(GRACE_S)
        if ended == "ended" and self._process.returncode:
            ended = f"exit code {self._process.returncode}"
        return self._found(ended)

    def _kill(self) -> None:
        """End the program and all processes that it started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self, log: Path) -> None:
        assert self._process.stdout is not None
        with log.open("a") as file:
            for line in self._process.stdout:
                self._lines.append(line.rstrip("\n"))
                file.write(line)
                file.flush()
                shown = line if len(line) <= LONGEST else f"{line[:LONGEST]} … (all of it is in {log})\n"
                sys.stdout.write(f"  {shown}")
                sys.stdout.flush()

    def _found(self, ended: str) -> dict[str, Any]:
        lines = list(self._lines)
        found: Any
        if self._job.reads == "file":
            found = read_json(self._result)
        elif self._job.reads == "pytest":
            found = {"tests": pytest_rows(lines)}
        else:
            found = last_json(lines)
        failed = ended not in ("ended", "running")
        return {
            "ended": ended,
            "seconds": round(time.monotonic() - self._begun, 1),
            "found": found,
            "gpu": self._samples,
            "last_lines": lines[-TAIL:] if failed else [],
        }


def pytest_rows(lines: list[str]) -> dict[str, dict[str, str]]:
    """Return the outcome of each test, and the reason of a failure if printed, from the lines of ``pytest -v``."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        if match := _XDIST.match(line):
            rows[match[2].strip()] = {"outcome": match[1].lower()}
        elif match := _PLAIN.match(line):
            rows[match[1]] = {"outcome": match[2].lower()}
        elif (match := _REASON.match(line)) and match[1] in rows:
            rows[match[1]]["why"] = match[2]
    return rows


def last_json(lines: list[str]) -> Any:
    """Return the last line that is a JSON object, or None."""
    for line in reversed(lines):
        if line.startswith("{"):
            with suppress(ValueError):
                return json.loads(line)
    return None


@cache
def _writable_home() -> dict[str, str]:
    """Return variables for a writable HOME if the current one is not: Triton and other packages keep caches there.

    The folder is private, because code in a cache is executed.
    """
    home = os.environ.get("HOME", "")
    return {} if home and os.access(home, os.W_OK) else {"HOME": tempfile.mkdtemp(prefix="vitpar-home-")}
