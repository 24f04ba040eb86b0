"""Control of the contenders: starts their processes, gives them turns and compares them. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from bench.peers import CONTENDERS
from bench.peers.job import Job

EXPERIMENTS = Path(__file__).parents[2]
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest relative difference of the losses of the first steps, by precision.

It is large in bf16, because autocast rounds at other places than vitpar, which casts parameters to bf16.
"""


class Left(Exception):
    """A contender cannot continue. kind: `missing` (not installed), `failed`, `full` (out of memory) or `died`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind, self.why = kind, why


class Contender:
    """A worker process, which waits for its turns. As a context manager, it ends the process on exit.

    parameters: number of parameters. version: library and its version. Both are known after `ready`.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.name = job, CONTENDERS[job.contender]
        self.parameters, self.version = 0, ""
        path = os.pathsep.join([str(EXPERIMENTS), str(EXPERIMENTS.parent / "src"), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.worker", job.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("VERBOSE") else subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )

    def ready(self) -> Self:
        """Wait until it can take its first step. Raises Left."""
        answer = self._answer()
        self.parameters, self.version = answer["parameters"], answer["version"]
        return self

    def turn(self, steps: int, untimed: int = 0, losses: bool = False) -> dict[str, Any]:
        """Let it make `untimed` steps, then `steps` timed ones; return its answer (``bench.peers.worker``).

        losses: whether to return the losses of all these steps. Raises Left.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"steps": steps, "untimed": untimed, "losses": losses}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer below says why
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Left("died", f"ended with exit code {self._process.wait()}: see its messages with VERBOSE=1")
        answer = json.loads(line)
        for kind in ("missing", "failed", "full"):
            if kind in answer:
                raise Left(kind, answer[kind])
        return answer


@dataclass
class Timed:
    """Measurements of one contender. Each list but `losses` has one mean per round."""

    contender: Contender
    losses: list[float]
    """Losses of the first steps."""
    wall: list[float] = field(default_factory=list)
    """Seconds of a step."""
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of a step, all threads."""
    faults: list[float] = field(default_factory=list)
    """Page faults of a step."""
    memory_bytes: int | None = None
    """Peak GPU memory that it allocated, in bytes; None on the CPU."""

    def add(self, answer: dict[str, Any], steps: int) -> None:
        """Add the worker's answer to a turn of `steps` steps."""
        for name in ("wall", "cpu", "faults"):
            getattr(self, name).append(answer[name] / steps)
        self.memory_bytes = answer.get("memory_bytes")

    def extended(self, other: Timed) -> Timed:
        """Return these measurements with those of the same contender after another start."""
        lists = {name: getattr(self, name) + getattr(other, name) for name in ("wall", "cpu", "faults")}
        return replace(self, **lists)

    def to_json(self) -> dict[str, Any]:
        """Return the measurements with the contender's name, version and number of parameters."""
        names = ("losses", "wall", "cpu", "faults", "memory_bytes")
        who = {"contender": self.contender.job.contender, "version": self.contender.version}
        return {**who, "parameters": self.contender.parameters, **{name: getattr(self, name) for name in names}}


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
