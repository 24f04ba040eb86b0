"""Answers of the ranks of a hung run, and the sentence for the user that combines them."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from vitpar.text import ranks

_MOST_FOLDERS = 4
"""Most folders, and most hosts, that a sentence names."""
_POINT_TO_POINT = "mesh_pp"
"""Description of the groups for sends between stages. Their members do not call the same operations."""


@dataclass(frozen=True)
class Answer:
    """State of a rank of a hung run."""

    rank: int
    """Rank in the world."""
    phase: str
    """Current activity, such as "computing step"."""
    step: int
    """Step of the phase; 0 if it has none."""
    issued: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    """Number of collectives that it has called in each process group, and the group's ranks, by the group's name."""
    doing: str = ""
    """Collective that it is at; empty unless their order is watched."""
    folder: str = ""
    """Folder of its stacks; empty if it cannot write them."""

    @property
    def place(self) -> str:
        """Description of phase and step."""
        return f"{self.phase} {self.step}" if self.step else self.phase

    @classmethod
    def read(cls, text: str | bytes) -> Answer:
        """Parse the result of `text`."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """Return the answer as JSON, for `read`."""
        return json.dumps(asdict(self))


def issued() -> dict[str, tuple[int, list[int]]]:
    """Return the collectives that this process has called so far, by process group, with the ranks of the group."""
    if not dist.is_initialized():
        return {}
    collectives: dict[str, tuple[int, list[int]]] = {}
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != _POINT_TO_POINT:
            number = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stubs lack it
            collectives[group.group_name] = number, dist.get_process_group_ranks(group)
    return collectives


def stacks() -> str:
    """Return the stack of each thread of this process, the main thread first."""
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != threading.main_thread().ident)
    return "\n".join(
        f"thread {threads.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames
    )


def dump(answer: Answer, seconds: float) -> str:
    """Return the text of a rank's dump.

    seconds: since its last progress.
    """
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    doing = f"\nat {answer.doing}" if answer.doing else ""
    calls = "".join(f"\n{number} collectives called among {ranks(who)}" for number, who in answer.issued.values())
    return f"rank {answer.rank}, {now}: {answer.place}, for {seconds:.0f} s or longer{doing}{calls}\n\n{stacks()}"


def behind(answers: Iterable[Answer]) -> tuple[list[int], list[int]]:
    """Return the ranks that others wait for, and the ranks that wait.

    A rank is waited for if it has called fewer collectives of a group than others and is not ahead in any group. Both
    lists are empty if the counts do not show it.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
    for answer in answers:
        for name, (number, members) in answer.issued.items():
            groups[name, tuple(members)][answer.rank] = number
    waiting, awaited = set[int](), set[int]()
    for numbers in groups.values():
        waiting |= {rank for rank, number in numbers.items() if number > min(numbers.values())}
        awaited |= {rank for rank, number in numbers.items() if number < max(numbers.values())}
    return sorted(awaited - waiting), sorted(waiting)


def leave(folder: Path, rank: int, text: str) -> None:
    """Write the dump of `rank` to a file in `folder`, replacing an earlier one, without following links.

    Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{rank}.txt"
    path.unlink(missing_ok=True)
    with path.open("x") as file:  # "x" also fails for a link
        file.write(text)


def sentence(answers: Mapping[int, Answer], world: int, minutes: float) -> str:
    """Return the sentence for the user.

    answers: those of the ranks that answered.
    world: number of ranks.
    minutes: time without progress.
    """
    where: dict[str, list[int]] = defaultdict(list)
    for rank, answer in sorted(answers.items()):
        where[f"{answer.place}{f' (at {answer.doing})' if answer.doing else ''}"].append(rank)
    silent = [rank for rank in range(world) if rank not in answers]
    late, waiting = behind(answers.values())
    parts = []
    if silent:
        parts.append(f"{ranks(silent)} did not respond")
    elif late:
        parts.append(f"{ranks(late)} had not reached a collective that {ranks(waiting)} had called")
    parts += [f"{ranks(who)} {'was' if len(who) == 1 else 'were'} {what}" for what, who in where.items()]
    if world > 1 and not silent and not late and len(where) == 1:
        parts.append("which one blocks the others is unknown")
    if world == 1:
        parts = [f"it was {what}" for what in where]
    folders = sorted({answer.folder for answer in answers.values() if answer.folder})
    said = " and ".join(f"'{folder}'" for folder in folders[:_MOST_FOLDERS])
    more = f" and {len(folders) - _MOST_FOLDERS} more" if len(folders) > _MOST_FOLDERS else ""
    where_stacks = f"; stacks are in {said}{more}" if folders else ""
    return f"the run hangs: no progress for {minutes:g} minutes; {', '.join(parts)}{where_stacks}"


def lost_sentence(silent: Mapping[int, str], rank: int, seconds: float) -> str:
    """Return the sentence for the user about lost ranks.

    silent: hosts of the lost ranks; rank 0's is the address of the store.
    rank: the rank that noticed.
    seconds: time without a sign of life.
    """
    hosts = sorted(set(filter(None, silent.values())))
    named = hosts[:_MOST_FOLDERS] + ["others"] * (len(hosts) > _MOST_FOLDERS)
    on = f" on {' and '.join(named)}" if hosts else ""
    verb, whose = ("was", "its process is") if len(silent) == 1 else ("were", "their processes are")
    return (
        f"{ranks(silent)}{on} {verb} silent towards rank {rank} for {seconds:g} s: {whose} stopped, or the machine or "
        f"its network is down; check that host, then start the run again with --resume auto"
    )
