"""A contender's side of taking turns: called after each of its optimizer steps, sleeps while it is not its turn."""

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
    """Reads ``{"steps": n, "untimed": m, "losses": bool}`` from the other side, lets the loop go on for m + n steps and
    answers with what the last n took.

    They are read in this process, after the device has finished: `wall` on the clock and `cpu` of all threads in
    seconds, and `faults`, how many pages of memory the system had to give. The end of the input ends the process.
    """

    def __init__(self, device: torch.device, asked: TextIO, answers: TextIO) -> None:
        self._device, self._asked, self._answers = device, asked, answers
        self._left = self._timed = 0
        self._losses: list[Tensor] | None = None
        self._begun: dict[str, float] = {}

    def tell(self, **answer: Any) -> None:
        """One line to the other side."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def ready(self, parameters: int, version: str) -> None:
        """Must be called once, before the first step: says what is there to train, and waits for the first turn."""
        self.tell(ready=True, parameters=parameters, version=version)
        self._wait()

    def stepped(self, loss: Tensor) -> None:
        """Must be called after every optimizer step, with its loss (0-dim, before the update). Is not read before the
        turn ends."""
        if self._losses is not None:
            self._losses.append(loss.detach().clone())  # a compiled step may write the next loss there
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
            torch.cuda.empty_cache()  # the next contender may need it
        self.tell(**answer)
        self._wait()

    def _wait(self) -> None:
        line = self._asked.readline()
        if not line:
            os._exit(0)  # no loop of anybody's has to be asked to end
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
    """Standard input and output as they were. What anyone prints from here on goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return sys.stdin, answers
