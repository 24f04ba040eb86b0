"""Channel from a run to the process of one tracker, which never blocks the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from vitpar.text import count
from vitpar.training.tracking.tracked_run import TrackedRun

CAPACITY = 2_000
"""Messages that wait for a tracker; beyond that the oldest are dropped."""
MAX_PROBLEM_BYTES = 4_096
"""Bytes of a tracker's error that are read."""
SOURCE = Path(__file__).parents[3]
"""Folder of the package vitpar, for the tracker's process."""


class Channel:
    """Bounded queue of messages, a thread that passes them on, and the tracker's process that reads them.

    tracker: name of the tracker.
    run: facts that it logs first.
    """

    def __init__(self, tracker: str, run: TrackedRun) -> None:
        self.tracker = tracker
        self._first = {"tracker": tracker, "run": asdict(run)}
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._last: dict[str, Any] | None = None
        self._dropped = 0
        self._problem: str | None = None
        self._reported = False
        self._process: subprocess.Popen[bytes] | None = None
        # A daemon, so that the program can end while the tracker's process cannot be started or written to.
        self._thread = threading.Thread(target=self._pass_on, name=f"track-{tracker}", daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any]) -> None:
        """Queue a message. If the queue is full, its oldest message is dropped. Never waits for the tracker."""
        with self._changed:
            if self._last is not None or self._problem is not None:
                return
            if len(self._waiting) >= CAPACITY:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(message)
            self._changed.notify()

    def close(self, failed: bool) -> None:
        """Announce the end of the run. Messages after it are ignored.

        failed: whether the run failed.
        """
        with self._changed:
            self._last = {"failed": failed}
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait until the tracker has everything; at `deadline`, in seconds of ``time.monotonic``, end its process."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            return
        with self._changed:
            self._problem = self._problem or "it did not finish in time, so its last values may be missing"
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # a session of its process and those that it started
                os.killpg(self._process.pid, signal.SIGKILL)

    def problem(self) -> str | None:
        """Return a warning about the tracker, once; None if there is nothing new."""
        with self._changed:
            if self._reported or (self._problem is None and not (self._last and self._dropped)):
                return None
            self._reported = True
            if self._problem is not None:
                return f"the tracker {self.tracker} failed, and the run continues without it: {self._problem}"
            lost = count(self._dropped, "row")
            return f"the tracker {self.tracker} was too slow: its oldest {lost} that waited were dropped"

    def _pass_on(self) -> None:
        """Start the process, write every message to it, and wait for its end. Runs in the thread."""
        try:
            process = self._process = self._started()
        except OSError as error:
            self._fail(f"its process cannot be started: {error.strerror}")
            return
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # the process has ended
            self._write(process.stdin)
        with suppress(OSError):
            process.stdin.close()
        if said := process.stdout.read(MAX_PROBLEM_BYTES).decode("utf-8", "replace"):
            self._fail(said)
        if code := process.wait():
            self._fail(f"its process ended with exit code {code}")

    def _started(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            # -P: do not import modules from the current folder, in which W&B may have a folder `wandb`.
            [sys.executable, "-P", "-m", "vitpar.training.tracking.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C must reach the run alone
        )

    def _write(self, pipe: IO[bytes]) -> None:
        """Write the first message, all that are queued until the channel is closed, and the last one."""
        message: dict[str, Any] | None = self._first
        while message is not None:
            pipe.write(json.dumps(message).encode() + b"\n")
            pipe.flush()
            if message is self._last:
                break
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._last)
                message = self._waiting.popleft() if self._waiting else self._last

    def _fail(self, problem: str) -> None:
        with self._changed:
            self._problem = self._problem or problem
            self._waiting.clear()
