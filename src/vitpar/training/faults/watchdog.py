"""Watchdog: end a run that makes no progress, with one sentence that names the ranks that the others wait for.

A thread of each rank puts a note into the store where the ranks met, every few seconds: what the rank does, at which
step, and how many collectives it has called. Collectives are what hangs, and sockets do not tell: without traffic a cut
link looks like a slow peer. Rank 0 reads all notes and judges:

- A rank whose note has not changed for LOST_S is stopped, or its machine or network is down. The other ranks judge so
  of rank 0.
- If rank 0 makes no progress for `minutes`, the run hangs, since no rank makes a step without the others.

Rank 0 puts the sentence into its note. Every rank that reads it writes its stacks to <run>/hang/rank<n>.txt and ends.
"""

import faulthandler
import json
import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from vitpar.errors import FaultError
from vitpar.launch import report_failure
from vitpar.launch.world_group import barrier, broadcast_json
from vitpar.text import log_line, ranks

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
"""Most seconds between two notes of a rank."""
LOST_S = 120.0
"""Seconds without a new note after which a rank counts as lost."""
SILENT = 3
"""Missed notes after which a rank counts as silent if the run hangs anyway."""
DUMP_S = 5.0
"""Seconds to wait for the file system, which may be what hangs."""
_POINT_TO_POINT = "mesh_pp"
"""Description of the groups for sends between stages. Their members do not call the same operations."""


class Note(NamedTuple):
    """State of a rank."""

    number: int
    """Number of the note. A rank that is stopped writes no further one."""
    place: str
    """Current activity with its step, such as "computing step 7"."""
    host: str
    """Name of the rank's machine."""
    calls: Mapping[str, tuple[int, Sequence[int]]]
    """Collectives that the rank has called so far in each process group, and the group's ranks, by the group's name."""
    sentence: str = ""
    """Error with which all ranks end; empty while the run is fine."""


class Watchdog:
    """Context manager that ends this process, with exit code 1, after `minutes` without a beat.

    Only for programs whose process may be ended, such as ``vitpar train``. All ranks of the world have one.

    minutes: 0 for never.
    """

    def __init__(self, minutes: float = 0.0) -> None:
        self._minutes = minutes
        self._place = (STARTING, 0)
        self._ended = threading.Event()
        self._number = 0
        self._store: dist.Store | None = None
        self.settled = False
        """Whether the first step is done. The trainer sets it."""
        self.folder: Path | None = None
        """Folder of the stacks; None until it is known."""

    def __enter__(self) -> Self:
        if not self._minutes:
            return self
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._every = min(LISTEN_S, self._minutes * 60 / 10)
        if self._world > 1:
            # A client of its own, since a waiting call blocks all other calls of a client.
            store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # not in its stubs
            # torchrun may keep a store when it restarts the ranks, so keys are new.
            self._store = dist.PrefixStore(f"vitpar/hang/{broadcast_json(os.urandom(8).hex())}", store)
            self._store.set(str(self._rank), self._note())
            barrier()  # so that every rank finds the notes of the others
        watched = range(self._world if self._rank == 0 else 1)
        # Read here: a link may be cut before the thread reads for the first time.
        arguments = watched, self._exchange(watched)
        threading.Thread(target=self._watch, args=arguments, name="vitpar-watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def beat(self, phase: str, step: int) -> None:
        """Record progress: something finished, and `phase` of `step` begins. Costs as much as writing an attribute."""
        self._place = phase, step

    def outlive(self) -> None:
        """Make timeouts of all process groups longer than the patience, so that the hang is reported instead."""
        # Groups that compare their collectives keep theirs: torch would print a warning.
        if self._minutes and dist.get_debug_level() != dist.DebugLevel.DETAIL:
            # upstream: public in torch 2.15, not in 2.13; there the private name warns.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            for group in dist.distributed_c10d._world.pg_map:
                set_timeout(timedelta(seconds=self._start_seconds + 60), group)

    @property
    def _patience(self) -> float:
        return self._minutes * 60 if self.settled else self._start_seconds

    @property
    def _start_seconds(self) -> float:
        return max(START_FACTOR * self._minutes * 60, LEAST_START_S)

    def _note(self, sentence: str = "") -> str:
        self._number += 1
        phase, step = self._place
        place = f"{phase} {step}" if step else phase
        groups: list[Any] = [*dist.distributed_c10d._world.pg_map] if self._store else []  # alone: waits for no other
        groups = [group for group in groups if group.group_desc != _POINT_TO_POINT]
        counts = {g.group_name: (g._get_sequence_number_for_group(), dist.get_process_group_ranks(g)) for g in groups}
        return json.dumps(Note(self._number, place, platform.node(), counts, sentence))

    def _watch(self, watched: Sequence[int], notes: list[bytes]) -> None:
        """Write notes, and read those of the `watched` ranks, until the run ends or has to. Runs in the thread."""
        place, idle = self._place, 0.0
        quiet = [0.0] * len(watched)
        # Count polls instead of reading the clock: a process suspended for an hour has not waited for an hour.
        while not self._ended.wait(self._every):
            idle = idle + self._every if self._place is place else 0.0
            place, former = self._place, notes
            # The store's process may be stopped, or its machine gone. A timeout of the store would print a warning.
            lost_store = threading.Timer(LOST_S, self._give_up, [notes, {0: LOST_S}])
            lost_store.daemon = True
            lost_store.start()
            try:
                notes = self._exchange(watched)
            except dist.DistError:  # the store's process is gone, so this rank will end too
                return
            finally:
                lost_store.cancel()
            same = [new == old for new, old in zip(notes, former, strict=True)]
            quiet = [(seconds + self._every) * still for seconds, still in zip(quiet, same, strict=True)]
            if sentence := Note(*json.loads(notes[0])).sentence:
                self._end(sentence, says_it=False)
            hangs = self._rank == 0 and idle >= self._patience
            limit = SILENT * self._every if hangs else LOST_S
            lost = {rank: seconds for rank, seconds in enumerate(quiet) if seconds >= limit}
            if hangs or lost:
                self._give_up(notes, lost)

    def _exchange(self, watched: Sequence[int]) -> list[bytes]:
        """Put this rank's note into the store, and return those of the `watched` ranks."""
        note = self._note()
        if self._store is None:
            return [note.encode()]
        self._store.set(str(self._rank), note)
        return self._store.multi_get([str(rank) for rank in watched])

    def _give_up(self, notes: Sequence[bytes], silent: Mapping[int, float]) -> None:
        """End all ranks of a run that hangs. Arguments are as in `verdict`."""
        stacks = f"; stacks are in '{self.folder}'" if self.folder else ""
        words = verdict([Note(*json.loads(note)) for note in notes], silent, self._patience / 60)
        sentence = f"the run hangs: {words}{stacks}"
        if self._store and self._rank == 0 and 0 not in silent:
            self._store.set("0", self._note(sentence))
        self._end(sentence, says_it=True)

    def _end(self, sentence: str, *, says_it: bool) -> None:
        """Write the stacks, report `sentence`, and end this process.

        says_it: whether this rank prints the sentence if vitpar's launcher does not. Errors of lost connections, which
        the main thread may then raise, are not shown.
        """
        own = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        writing = threading.Thread(target=self._write, args=(sentence if says_it else "",), daemon=True)
        try:
            writing.start()
            writing.join(DUMP_S)
            # Until the others have read it and written their stacks. A launcher ends all at the first exit.
            time.sleep((2 if says_it else 4) * self._every)
            if not report_failure(FaultError(sentence)) and says_it:
                os.write(own, f"error: {sentence}\n".encode())
            time.sleep(1.0)  # rank 0 may host the store
        finally:
            os._exit(1)

    def _write(self, sentence: str) -> None:
        """Write the stacks of this rank and, on rank 0, the sentence to log.txt and metrics.jsonl."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank{self._rank}.txt"
            path.unlink(missing_ok=True)
            with path.open("x") as file:  # "x": never write through a link that somebody put there
                file.write(f"{Note(*json.loads(self._note())).place}\n\n")
                file.flush()
                faulthandler.dump_traceback(file)
            if sentence and self._rank == 0:
                with (self.folder.parent / "log.txt").open("a") as log:
                    log.write(log_line(f"error: {sentence}"))
                event = {"kind": "event", "event": "error", "step": self._place[1], "text": sentence}
                with (self.folder.parent / "metrics.jsonl").open("a") as rows:
                    rows.write(f"{json.dumps(event)}\n")


def verdict(notes: Sequence[Note], silent: Mapping[int, float], minutes: float) -> str:
    """Return the words on a run that hangs.

    notes: the last note of each rank, from rank 0 on.
    silent: seconds for which ranks have given no sign of life.
    minutes: time without progress, if no rank is silent.
    """
    if silent:
        hosts = " and ".join(sorted({notes[rank].host for rank in silent}))
        whose = "its process is" if len(silent) == 1 else "their processes are"
        parts = [
            f"{ranks([*silent])} on {hosts} gave no sign of life for {min(silent.values()):.3g} s: {whose} stopped, or "
            "the machine or its network is down"
        ]
    else:
        parts = [f"no progress for {minutes:g} minutes"]
        late, waiting = behind(notes)
        if late:
            parts.append(f"{ranks(late)} had not reached a collective that {ranks(waiting)} had called")
    where: dict[str, list[int]] = defaultdict(list)
    for rank, note in enumerate(notes):
        where[note.place].append(rank)
    return "; ".join(
        [*parts, *(f"{ranks(who)} {'was' if len(who) == 1 else 'were'} {place}" for place, who in where.items())]
    )


def behind(notes: Sequence[Note]) -> tuple[list[int], list[int]]:
    """Return the ranks that others wait for, and the ranks that wait.

    A rank is waited for if it has called fewer collectives of a group than others and is not ahead in any group. Both
    lists are empty if the counts do not show it.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for rank, note in enumerate(notes):
        for name, (number, members) in note.calls.items():
            groups[name, tuple(members)][rank] = number
    waiting, awaited = set[int](), set[int]()
    for numbers in groups.values():
        waiting |= {rank for rank, number in numbers.items() if number > min(numbers.values())}
        awaited |= {rank for rank, number in numbers.items() if number < max(numbers.values())}
    return sorted(awaited - waiting), sorted(waiting)
