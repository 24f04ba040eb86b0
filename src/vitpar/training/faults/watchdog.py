"""Watchdog: detect that a run hangs, make every rank write down what it is doing, and end the run with one sentence.

    watchdog thread   counts the time since the last beat; at the end of its patience, or when called, it
                      writes <run>/hang/rank3.txt (to a new temporary folder before the run has one),
                      leaves its answer in the store, waits some seconds for the others', and ends this process
    listening thread  polls every few seconds whether another rank calls

Ranks communicate through the store where they met, since collectives are what hangs. A rank that is stopped, or whose
machine is gone, gives no answer: the others say so. The first sentence that a rank puts into the store is used by all.

The listening thread also gives a sign of life with each poll. Rank 0 ends the run if another rank gives none for LOST_S
seconds, and another rank ends if the store does not answer for as long. Sockets do not tell: without traffic a cut link
looks like a slow peer.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from vitpar.errors import FaultError
from vitpar.launch import report_failure
from vitpar.launch.world_group import barrier, broadcast_json
from vitpar.text import log_line
from vitpar.training.faults.hang import Answer, dump, issued, leave, lost_sentence, sentence

T = TypeVar("T")
STARTING = "starting"
WAITING = "waiting for the data of step"
COMPUTING = "computing step"
EVALUATING = "evaluating after step"
SAVING = "saving the checkpoint of step"
FINISHING = "saving the weights"

START_FACTOR, LEAST_START_S = 3.0, 120.0
"""Patience until the first step is done, which compiles and reads for the first time.

A factor of the later patience, and the least seconds.
"""
LISTEN_S = 2.0
"""Most seconds between two polls of the store."""
LOST_S = 120.0
"""Seconds without a sign of life after which a rank counts as lost."""
ANSWER_S = 5.0
"""Seconds that a rank has to answer after it noticed that another calls."""
_PREFIX = "vitpar/hang"


class Watchdog:
    """Context manager that ends this process, with exit code 1, after `minutes` without a beat.

    Only for programs whose process may be ended, such as ``vitpar train``. All ranks of the world have one.

    minutes: 0 for never.
    """

    def __init__(self, minutes: float = 0.0) -> None:
        self._minutes = minutes
        self._place = (STARTING, 0)
        self._ended = threading.Event()
        self._called = False
        self._polls = 0
        self._silent: dict[int, str] = {}
        self.settled = False
        """Whether the first step is done. The trainer sets it."""
        self.folder: Path | None = None
        """Folder of the dumps; None until it is known."""
        self.doing: Callable[[], str] = str
        """Returns the collective that this rank is at, or an empty string if that is not known."""

    def __enter__(self) -> Watchdog:
        if not self._minutes:
            return self
        self._world, self._rank = dist.get_world_size(), dist.get_rank()
        self._listen_every = min(LISTEN_S, self._minutes * 60 / 10)
        threads = [threading.Thread(target=self._watch, name="vitpar-watchdog", daemon=True)]
        if self._world > 1:
            # Each thread has its own client: a waiting call blocks all other calls of the same client.
            store = dist.distributed_c10d._get_default_store()
            # torchrun may keep a store when it restarts the ranks, so keys are new.
            prefix = f"{_PREFIX}/{broadcast_json(os.urandom(8).hex())}"
            self._store, heard = (
                dist.PrefixStore(prefix, store.clone())  # type: ignore[attr-defined]  # torch's stubs lack it
                for _ in range(2)
            )
            self._store.set(f"alive/{self._rank}", f"- {platform.node()}")
            barrier()  # so that rank 0 finds the signs of all
            threads.append(threading.Thread(target=self._listen, args=(heard,), name="vitpar-listen", daemon=True))
        for thread in threads:
            thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def beat(self, phase: str, step: int) -> None:
        """Record progress: something finished, and `phase` of `step` begins. Costs as much as writing an attribute."""
        self._place = phase, step

    def outlive(self) -> None:
        """Make timeouts of collectives longer than the patience, for all existing process groups.

        The run then reports the hang instead of a timeout.
        """
        if self._minutes:
            # upstream: public in torch 2.15, not in 2.13; there the private name warns.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in dist.distributed_c10d._world.pg_map:
                set_timeout(timedelta(seconds=self._start_seconds + 60), group)

    @property
    def _start_seconds(self) -> float:
        return max(START_FACTOR * self._minutes * 60, LEAST_START_S)

    def _watch(self) -> None:
        seen, seconds = self._place, 0.0
        polls, unanswered = self._polls, 0.0
        tick = min(1.0, self._minutes * 60 / 20)
        while not self._called and not self._silent:
            if self._ended.wait(tick):
                return
            # Count ticks instead of reading the clock: a process suspended for an hour has not waited for an hour.
            seconds = seconds + tick if self._place is seen else 0.0
            seen = self._place
            unanswered = unanswered + tick if self._polls == polls else 0.0
            polls = self._polls
            if unanswered >= LOST_S and self._world > 1:
                self._silent = {0: os.environ.get("MASTER_ADDR", "")}
            if seconds >= (self._minutes * 60 if self.settled else self._start_seconds):
                break
        try:
            self._end(seconds)
        finally:
            os._exit(1)

    def _listen(self, store: dist.Store) -> None:
        host, signs, quiet = platform.node(), list[bytes](), [0] * self._world
        keys = [f"alive/{rank}" for rank in range(self._world)]
        with suppress(dist.DistError):  # the process with the store is gone, so this rank will end too
            while not self._ended.wait(self._listen_every):
                store.set(keys[self._rank], f"{self._polls} {host}")
                if store.check(["call"]):
                    self._called = True
                    return
                self._polls += 1
                if self._rank == 0:
                    before, signs = signs, store.multi_get(keys)
                    same = [old == new for old, new in zip(before or signs, signs, strict=True)]
                    quiet = [(count + 1) * old for count, old in zip(quiet, same, strict=True)]
                    silent = [rank for rank, count in enumerate(quiet) if count * self._listen_every >= LOST_S]
                    self._silent = {rank: signs[rank].decode().partition(" ")[2] for rank in silent}
                    if silent:
                        return

    def _end(self, seconds: float) -> None:
        """End this process within some seconds, even if the store or the disk does not answer.

        seconds: since the last progress.
        """
        phase, step = self._place
        called = _within(1.0, issued) or {}
        folder = self.folder or _within(1.0, lambda: Path(mkdtemp(prefix="vitpar-hang-")))
        doing = _within(1.0, self.doing) or ""
        answer = Answer(self._rank, phase, step, called, doing, str(folder or ""))
        minutes = self._minutes if self.settled else self._start_seconds / 60
        lost = lost_sentence(self._silent, self._rank, LOST_S) if self._silent else ""
        if folder:
            _within(ANSWER_S / 2, lambda: leave(folder, self._rank, dump(answer, seconds)))
        patience = 2 * self._listen_every + ANSWER_S
        agreed = _within(patience + ANSWER_S, lambda: self._agree(answer, patience, minutes, lost))
        author, text = agreed or (self._rank, lost or sentence({self._rank: answer}, self._world, minutes))

        def tell() -> None:
            reported = report_failure(FaultError(text))
            if author == self._rank and not reported:
                os.write(2, f"error: {text}\n".encode())
            # One sentence is enough: hide later errors of the main thread about lost connections.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

        if author == self._rank and self.folder:
            log = self.folder.parent / "log.txt"
            _within(1.0, lambda: _log(log, text))
        _within(1.0, tell)
        time.sleep(1.0 if self._rank == 0 else 0.5)  # until all have read the sentence; rank 0 may host the store
        os._exit(1)

    def _agree(self, answer: Answer, patience: float, minutes: float, lost: str) -> tuple[int, str]:
        """Agree on one sentence with all ranks.

        lost: the sentence, if ranks are lost.

        Returns the rank that made it, and the sentence.
        """
        if self._world == 1:
            return 0, sentence({0: answer}, 1, minutes)
        store = self._store
        store.set("call", "")
        store.set(f"answer/{answer.rank}", answer.text())
        deadline = time.monotonic() + patience
        missing = set(range(self._world))
        while missing - self._silent.keys() and time.monotonic() < deadline and not store.check(["sentence"]):
            time.sleep(0.1)
            missing = {rank for rank in missing if not store.check([f"answer/{rank}"])}
        answers = {rank: Answer.read(store.get(f"answer/{rank}")) for rank in range(self._world) if rank not in missing}
        mine = json.dumps([answer.rank, lost or sentence(answers, self._world, minutes)])
        author, text = json.loads(store.compare_set("sentence", "", mine))
        return author, text


def _log(path: Path, text: str) -> None:
    with suppress(OSError), path.open("a") as log:
        log.write(log_line(f"error: {text}"))


def _within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return the result of `work`; None if it takes longer than `seconds` or fails.

    A failure does not matter, since the process ends in any case.
    """
    results: list[T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
