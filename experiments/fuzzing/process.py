"""Worker process, seen from its parent: receives orders, reports its progress, and may hang or die."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

EXPERIMENTS = Path(__file__).resolve().parents[1]


class Hang(Exception):
    """A case takes too long."""


class Died(Exception):
    """The worker process has ended."""


class Process:
    """Handle of a worker process.

    home: its folder for cases and temporary files.
    """

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self._errors: IO[bytes] = (home / "errors").open("w+b")
        reading, writing = os.pipe()
        paths = [str(EXPERIMENTS), *(path for path in sys.path if path)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fuzzing.worker", str(writing), str(home)],
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[writing],
            env=environment | {"TMPDIR": str(home)},
            start_new_session=True,
        )
        os.close(writing)
        self._reading, self._rest = reading, b""

    def order(self, target: str, first: int, last: int | None, seconds: float) -> None:
        """Order the cases `first` to `last` of a target, or as many as fit into `seconds`."""
        words = {"target": target, "first": first, "last": last, "seconds": seconds}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the worker's next message. Raises Hang after `seconds`, Died if the worker ends."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise Hang
            data = os.read(self._reading, 1 << 16)
            if not data:
                raise Died
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def stack(self) -> str:
        """Return the stacks of its threads."""
        begin = self._errors.seek(0, os.SEEK_END)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        self._errors.seek(begin)
        return self._errors.read().decode(errors="replace").strip()

    def said(self) -> str:
        """Return the last 4,000 bytes of its output as text."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 4000))
        return self._errors.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process and all that it started; return its exit status."""
        self.kill()
        status = self._process.wait()
        os.close(self._reading)
        self._errors.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        return status

    def status(self) -> int:
        """Return the exit status of a process that has died or is about to."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(10)
        return 0
