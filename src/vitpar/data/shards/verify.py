"""Reads a whole data set back and reports whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitpar.data.images import decode
from vitpar.data.shards.index import Labels, offsets, scan
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.sources.source import Progress
from vitpar.errors import DataError

_TASK, _ROUND = 64, 1 << 14  # samples a thread takes at a time, and that are handed out at a time


@dataclass(frozen=True)
class Problem:
    """Something wrong with a sample, or with a shard as a tar file: then `sample` is None."""

    split: str
    sample: int | None
    name: str
    what: str


def verify(
    folder: str | Path, *, pixels: bool = True, workers: int = 2, progress: Progress | None = None
) -> Iterator[Problem]:
    """Yield every problem of every split.

    A shard has one where any tar reader would stumble (a damaged header, a missing end, something behind the end), or
    where its members, or their labels if the manifest tells where they are, are not those of the index. A sample has
    one where its bytes are not those that were indexed, or (`pixels`) where it cannot be decoded. workers: threads.
    Raises DataError where a data set cannot even be opened.
    """
    manifest = read_manifest(folder)
    labels = Labels.parse(manifest.labels) if manifest.labels else None
    for split in manifest.splits:
        shards = ShardSet.open(folder, split)
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="vitpar-verify") as pool:
            numbers = range(len(shards.files))
            for number, problem in enumerate(pool.map(partial(_shard_problem, shards, labels=labels), numbers), 1):
                if problem is not None:
                    yield problem
                if progress:
                    progress(f"{split} shards", number, len(shards.files))
            for begin in range(0, len(shards), _ROUND):
                end = min(begin + _ROUND, len(shards))
                tasks = [range(start, min(start + _TASK, end)) for start in range(begin, end, _TASK)]
                for task, found in zip(tasks, pool.map(partial(_problems, shards, pixels=pixels), tasks), strict=True):
                    yield from found
                    if progress:
                        progress(split, task.stop, len(shards))


def _shard_problem(shards: ShardSet, number: int, labels: Labels | None) -> Problem | None:
    """Return the problem of a shard as a tar file, by its headers and labels."""
    path, expected = shards.files[number], shards.rows_of(number)
    try:
        if labels is None:
            same = set(map(int, expected["offset"])) <= offsets(path)
            what = None if same else "its members are not those of the index: index it again"
            return Problem(shards.split, None, path.name, what) if what else None
        rows = scan(path, labels, checksums=False).numbered(shards.classes)
        same = len(rows) == len(expected) and all(
            np.array_equal(rows[name], expected[name]) for name in ("label", "offset", "size")
        )
        what = None if same else "its members or their labels are not those of the index: index it again"
    except DataError as error:
        what = str(error)
    return None if what is None else Problem(shards.split, None, path.name, what)


def _problems(shards: ShardSet, samples: range, pixels: bool) -> list[Problem]:
    found = []
    for i in samples:
        try:
            data = shards.read(i)
            if pixels:
                decode(data)
        except DataError as error:  # BadImage is one
            found.append(Problem(shards.split, i, shards.name(i), str(error)))
    return found
