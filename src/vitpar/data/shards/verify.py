"""Verification of a packed data set: read everything back and report problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vitpar.data.images import decode
from vitpar.data.shards.index import Labels, scan
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.sources.source import Progress
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError

_TASK, _ROUND = 64, 1 << 14  # samples in a task of the thread pool, and samples that are submitted at a time


@dataclass(frozen=True)
class Problem:
    """Problem of a sample or of a shard."""

    split: str
    """Name of the split."""
    sample: int | None
    """Number of the sample; None for a problem of a shard as a tar file."""
    name: str
    """Name of the sample or the shard's file name."""
    what: str
    """Description of the problem."""


def verify(
    folder: str | Path, *, pixels: bool = True, workers: int = 2, progress: Progress | None = None
) -> Iterator[Problem]:
    """Yield every problem of every split.

    A shard has a problem if a tar reader would fail on it (a damaged header, a missing end, data after the end), or if
    its members or their labels differ from the index. A sample has a problem if its bytes are not those that were
    indexed.

    pixels: whether to decode every image too; one that cannot be decoded is a problem. Text is always decoded.
    workers: number of threads.
    progress: called as shards and samples are verified.

    Raises DataError if the data set cannot be opened.
    """
    manifest = read_manifest(folder)
    for split in manifest.splits:
        shards: ShardSet = TextSet.open(folder, split) if manifest.text else ShardSet.open(folder, split)
        check: Callable[[int], object] = shards.ids if isinstance(shards, TextSet) else shards.read
        if pixels and not isinstance(shards, TextSet):
            check = partial(_decoded, shards)
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="vitpar-verify") as pool:
            if manifest.text is None:  # opening text has compared the sizes of its shards
                look = partial(_shard_problems, shards, Labels.parse(manifest.labels))
                for number, problems in enumerate(pool.map(look, range(len(shards.files))), 1):
                    yield from problems
                    if progress:
                        progress(f"{split} shards", number, len(shards.files))
            for begin in range(0, len(shards), _ROUND):
                end = min(begin + _ROUND, len(shards))
                tasks = [range(start, min(start + _TASK, end)) for start in range(begin, end, _TASK)]
                for task, problems in zip(tasks, pool.map(partial(_problems, shards, check), tasks), strict=True):
                    yield from problems
                    if progress:
                        progress(split, task.stop, len(shards))


def _shard_problems(shards: ShardSet, labels: Labels, number: int) -> list[Problem]:
    """Return the problem of shard `number` as a tar file, if there is one, found from its headers and labels."""
    path, expected = shards.files[number], shards.rows_of(number)
    try:
        rows = scan(path, labels, checksums=False).numbered(shards.classes)
        if all(np.array_equal(rows[name], expected[name]) for name in ("label", "offset", "size")):
            return []
        what = "its members or their labels differ from the index: index it again"
    except DataError as error:
        what = str(error)
    return [Problem(shards.split, None, path.name, what)]


def _decoded(shards: ShardSet, i: int) -> object:
    return decode(shards.read(i))


def _problems(shards: ShardSet, check: Callable[[int], object], samples: range) -> list[Problem]:
    """Return the problems of `samples`, for which `check` raises DataError."""
    problems = []
    for i in samples:
        try:
            check(i)
        except DataError as error:  # BadImage is one
            problems.append(Problem(shards.split, i, shards.name(i), str(error)))
    return problems
