"""Run `vitpar check …` and `pytest …` in a copy of the repository, and distinguish failures from crashes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GRACE = 5.0
"""Seconds between SIGTERM, at which vitpar ends its ranks, and SIGKILL."""
PYTEST = ("-m", "pytest", "-xq", "-pno:cacheprovider", "--hypothesis-profile=first", "--junitxml=verdict.xml")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    kind: Literal["passed", "failed", "crash", "hang"]
    """failed: an assertion of a test or the check failed. crash: any other error. hang: time limit exceeded."""
    words: str
    """Verdict or error in one line."""
    seconds: float = 0.0
    """Wall time."""


class Stopped(Exception):
    """The runner was stopped: no command runs any more."""


class Commands:
    """Thread-safe runner of commands.

    limit: seconds for one command.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._lock, self._stopped = limit, threading.Lock(), False
        self._running: set[subprocess.Popen[str]] = set()

    def run(self, command: str, root: Path) -> Outcome:
        """Run `command` in the copy of the repository in `root`. Raises Stopped."""
        (root / "verdict.xml").unlink(missing_ok=True)
        (root / "tmp").mkdir(exist_ok=True)
        begin, hangs = time.monotonic(), False
        with (root / "output.txt").open("w+") as output:
            process = self._start(command, root, output.fileno())
            try:
                process.wait(self._limit)
            except subprocess.TimeoutExpired:
                hangs = True
            finally:
                end(process)
                with self._lock:
                    self._running.discard(process)
        if self._stopped:
            raise Stopped
        seconds, said = time.monotonic() - begin, (root / "output.txt").read_text(errors="replace")
        if hangs:
            return Outcome("hang", f"no end after {self._limit:.0f} s; last line: {last_line(said)}", seconds)
        if is_check(command):
            return Outcome(*judge_check(process.returncode, said), seconds)
        return Outcome(*judge_tests(process.returncode, said, root / "verdict.xml"), seconds)

    def stop(self) -> None:
        """End the running commands and start no others."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            end(process)

    def _start(self, command: str, root: Path, output: int) -> subprocess.Popen[str]:
        paths = os.pathsep.join(str(root / name) for name in ("src", "cli"))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
        _, *words = shlex.split(command)
        with self._lock:
            if self._stopped:
                raise Stopped
            process = subprocess.Popen(
                [sys.executable, *(("-m", "vitpar_cli.main") if is_check(command) else PYTEST), *words],
                cwd=root,
                env=environment | {"TMPDIR": str(root / "tmp")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
            self._running.add(process)
        return process


def is_check(command: str) -> bool:
    """Return whether a command is `vitpar check`, not pytest."""
    return command.startswith("vitpar check ")


def end(process: subprocess.Popen[str]) -> None:
    """End a command and all processes that it started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        if process.poll() is None or number == signal.SIGKILL:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def judge_check(code: int, said: str) -> tuple[str, str]:
    """Return kind and words of the outcome of `vitpar check` from its exit code and output."""
    verdicts = [line.strip() for line in said.splitlines() if re.match(r"(FAILED|passed)\b", line)]
    for kind, at in (("passed", 0), ("FAILED", 1)):
        if code == at and verdicts and verdicts[-1].startswith(kind):
            return kind.lower(), verdicts[-1]
    return "crash", f"exit code {code} without a verdict: {last_line(said)}"


def judge_tests(code: int, said: str, file: Path) -> tuple[str, str]:
    """Return kind and words of the outcome of pytest from its exit code, its output and its XML file."""
    cases = list(xml.parse(file).iter("testcase")) if file.is_file() else []
    errors = [(case.get("name"), error) for case in cases for error in case if error.tag in ("failure", "error")]
    if code == 1 and errors:
        name, error = errors[0]
        kind, words = judge_error(error.get("message", ""))
        return kind if error.tag == "failure" else "crash", f"{name}: {words}"
    if code == 0 and (passed := sum(not len(case) for case in cases)):
        return "passed", f"{passed} passed"
    return "crash", f"exit code {code} without a verdict: {last_line(said)}"


def judge_error(message: str) -> tuple[str, str]:
    """Return kind and words of an error that a test raised.

    Errors of ranks reach the test's process as text: then the last traceback in the text decides.
    """
    if len(traces := re.split(r"^Traceback \(most recent call last\):$", message, flags=re.MULTILINE)) > 1:
        message = next((line for line in traces[-1].splitlines() if line and not line.startswith(" ")), message)
    asserted = re.match(r"(\w+\.)*(AssertionError|Failed|assert)\b", message) is not None
    return "failed" if asserted else "crash", last_line(message.partition("\n")[0])[:300]


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")
