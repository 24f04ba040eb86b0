"""Run `vitpar check …` and `pytest …` in a copy of the repository, and distinguish failures from crashes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mutating.pytest_verdict import VERDICTS

EXPERIMENTS = Path(__file__).resolve().parents[1]
GRACE = 5.0
"""Seconds between SIGTERM, at which vitpar ends its ranks, and SIGKILL."""

Kind = Literal["passed", "failed", "crash", "hang"]


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    kind: Kind
    """failed: an assertion of a test or the check failed. crash: any other error. hang: time limit exceeded."""
    words: str
    """Verdict or error in one line."""
    seconds: float = 0.0
    """Wall time."""


class Stopped(Exception):
    """The campaign was stopped: no command runs any more."""


class Commands:
    """Thread-safe runner of commands.

    limit: seconds for one command.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._lock, self._stopped = limit, threading.Lock(), False
        self._running: set[subprocess.Popen[bytes]] = set()

    def run(self, command: str, root: Path) -> Outcome:
        """Run `command` in the copy of the repository in `root`. Raises Stopped."""
        verdicts, output = root / "verdicts.jsonl", root / "output.txt"
        verdicts.unlink(missing_ok=True)
        (root / "tmp").mkdir(exist_ok=True)
        begin = time.monotonic()
        with output.open("wb") as file:
            process = self._start(command, root, file.fileno(), verdicts)
            try:
                code: int | None = process.wait(self._limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
                with self._lock:
                    self._running.discard(process)
        if self._stopped:
            raise Stopped
        seconds = time.monotonic() - begin
        said = output.read_text(errors="replace")
        if code is None:
            return Outcome("hang", f"no end after {self._limit:.0f} s; last line: {last_line(said)}", seconds)
        judged = judge_check(code, said) if is_check(command) else judge_tests(code, said, verdicts)
        return Outcome(judged.kind, judged.words, seconds)

    def stop(self) -> None:
        """End the running commands and start no others."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            end(process)

    def _start(self, command: str, root: Path, output: int, verdicts: Path) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(str(path) for path in (root / "src", root / "cli", EXPERIMENTS))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
        environment |= {"TMPDIR": str(root / "tmp"), VERDICTS: str(verdicts)}
        with self._lock:
            if self._stopped:
                raise Stopped
            process = subprocess.Popen(
                arguments(command),
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._running.add(process)
        return process


def is_check(command: str) -> bool:
    """Return whether a command is `vitpar check`, not pytest."""
    return command.startswith("vitpar check ")


def arguments(command: str) -> list[str]:
    """Return the program and arguments of a command."""
    program, *words = shlex.split(command)
    if is_check(command):
        return [sys.executable, "-m", "vitpar_cli.main", *words]
    assert program == "pytest", f"unknown command '{command}': use vitpar check or pytest"
    return [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "mutating.pytest_verdict", *words]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all processes that it started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        if process.poll() is None or number == signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def judge_check(code: int, said: str) -> Outcome:
    """Return the outcome of `vitpar check` from its exit code and output."""
    verdicts = [line.strip() for line in said.splitlines() if re.match(r"(FAILED|passed)\b", line)]
    if code == 0 and verdicts and verdicts[-1].startswith("passed"):
        return Outcome("passed", verdicts[-1])
    if code == 1 and verdicts and verdicts[-1].startswith("FAILED"):
        return Outcome("failed", verdicts[-1])
    return Outcome("crash", f"exit code {code} without a verdict: {last_line(said)}")


def judge_tests(code: int, said: str, verdicts: Path) -> Outcome:
    """Return the outcome of pytest from its exit code, its output and the lines of ``mutating.pytest_verdict``."""
    rows = [json.loads(line) for line in verdicts.read_text().splitlines()] if verdicts.is_file() else []
    for kind in ("failed", "crash"):
        if code == 1 and (found := [row for row in rows if row["kind"] == kind]):
            return Outcome("failed" if kind == "failed" else "crash", f"{found[0]['test']}: {found[0]['words']}")
    if code == 0 and any(row["kind"] == "passed" for row in rows):
        return Outcome("passed", f"{len(rows)} passed")
    return Outcome("crash", f"exit code {code} without a verdict: {last_line(said)}")


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
