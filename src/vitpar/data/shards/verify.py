"""Reads a whole data set back and reports whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitpar.data.images import decode
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError

_TASK, _ROUND = 64, 1 << 14  # samples a thread takes at a time, and that are handed out at a time

Progress = Callable[[str, int, int], None]
"""Called as (split, samples read, samples in all)."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a sample."""

    split: str
    sample: int
    name: str
    what: str


def verify(
    folder: str | Path, *, pixels: bool = True, workers: int = 2, progress: Progress | None = None
) -> Iterator[Problem]:
    """Every bad sample of every split: one whose bytes are not those that were indexed, or (`pixels`) which cannot be
    decoded. workers: threads. Raises DataError where a data set cannot even be opened."""
    for split in read_manifest(folder).splits:
        shards = ShardSet.open(folder, split)
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="vitpar-verify") as pool:
            for begin in range(0, len(shards), _ROUND):
                end = min(begin + _ROUND, len(shards))
                tasks = [range(start, min(start + _TASK, end)) for start in range(begin, end, _TASK)]
                for task, found in zip(tasks, pool.map(partial(_problems, shards, pixels=pixels), tasks), strict=True):
                    yield from found
                    if progress:
                        progress(split, task.stop, len(shards))


def _problems(shards: ShardSet, samples: range, pixels: bool) -> list[Problem]:
    found = []
    for i in samples:
        what = None
        try:
            data = shards.read(i)
            if not shards.intact(i, data):
                what = "its bytes are not those that were indexed"
            elif pixels:
                decode(data)
        except DataError as error:  # BadImage is one
            what = str(error)
        if what:
            found.append(Problem(shards.split, i, shards.name(i), what))
    return found
