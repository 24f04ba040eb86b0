"""Turns of a contender, seen from its process: called after each optimizer step, blocks while others have a turn."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any, TextIO

import torch
from torch import Tensor


class Turns:
    """Gate that lets the training loop run only during its turns.

    Reads a request ``{"steps": n, "untimed": m, "losses": bool}``, lets the loop make m + n steps, and answers with the
    total of the last n: `wall` and `cpu` (all threads) in seconds, and `faults`, minor page faults. They are measured
    in this process after the device has finished. The end of the input ends the process.
    """

    def __init__(self, device: torch.device, asked: TextIO, answers: TextIO) -> None:
        self._device, self._asked, self._answers = device, asked, answers
        self._left = self._timed = 0
        self._losses: list[Tensor] | None = None
        self._begun: dict[str, float] = {}

    def tell(self, **answer: Any) -> None:
        """Write an answer as one line of JSON."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def ready(self, parameters: int, version: str) -> None:
        """Report the model's size and wait for the first turn. Must be called once, before the first step."""
        self.tell(ready=True, parameters=parameters, version=version)
        self._wait()

    def stepped(self, loss: Tensor) -> None:
        """Count a step, and wait at the end of the turn. Must be called after every optimizer step.

        loss: 0-dim, from before the update. It is read only at the end of the turn, so that no step waits for it.
        """
        if self._losses is not None:
            self._losses.append(loss.detach().clone())  # a compiled step may overwrite the tensor
        self._left -= 1
        if self._left == self._timed:
            self._start()
        if self._left:
            return
        answer: dict[str, Any] = {name: end - self._begun[name] for name, end in self._read().items()}
        if self._losses is not None:
            answer["losses"] = [loss.item() for loss in self._losses]
        if self._device.type == "cuda":
            answer["memory_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()  # leave the memory to the next contender
        self.tell(**answer)
        self._wait()

    def _wait(self) -> None:
        line = self._asked.readline()
        if not line:
            os._exit(0)  # the training loops have no common way to stop
        turn = json.loads(line)
        self._timed = turn["steps"]
        self._left = self._timed + turn["untimed"]
        self._losses = [] if turn["losses"] else None
        if not turn["untimed"]:
            self._start()

    def _start(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._begun = self._read()

    def _read(self) -> dict[str, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        return {"wall": time.perf_counter(), "cpu": time.process_time(), "faults": faults}


def pipes() -> tuple[TextIO, TextIO]:
    """Return standard input and output, and redirect later output to standard error.

    So prints of the libraries do not mix with the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return sys.stdin, answers
