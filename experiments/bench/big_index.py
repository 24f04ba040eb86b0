"""Shard indices the size of large data sets, and the memory of the processes that read them."""

import json
import os
import time
from pathlib import Path

import numpy as np

from vitpar.data import SampleOrder, ShardSet
from vitpar.data.shards.manifest import ROW, Manifest, write_manifest, write_split


def own_memory() -> int:
    """Return the bytes of anonymous and shared memory of this process and its children.

    Memory that several processes share is divided among them. File mappings such as the index do not count: the
    kernel keeps one copy for all processes and evicts it when it needs memory.
    """
    lines = [
        line
        for pid in (os.getpid(), *_children())
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    ]
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))


def _children() -> list[int]:
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


def write_index(folder: Path, samples: int) -> None:
    """Write an index of `samples` samples, and sparse files as long as its shards, which use no disk space."""
    rng, each = np.random.default_rng(0), 5000
    rows = np.zeros(samples, ROW)
    rows["label"], rows["size"] = rng.integers(0, 1000, samples), 110_000
    rows["offset"] = np.arange(samples) % each * 112_000 + 1536
    tables, shards = [], []
    for number, first in enumerate(range(0, samples, each)):
        tables.append(rows[first : first + each])
        path = folder / f"train-{number:06d}.tar"
        with path.open("wb") as file:
            file.truncate(each * 112_000 + 10_240)
        shards.append(path)
    split = write_split(folder, "train", shards, tables, 1000)
    write_manifest(folder, Manifest(classes=[str(i) for i in range(1000)], splits={"train": split}))


def probe_index(folder: Path) -> int:
    """Print JSON: seconds to open the index and to look up the batch at sample 1,000,000, and the bytes this added."""
    before = own_memory()
    begun = time.perf_counter()
    shards = ShardSet.open(folder, "train")
    opened = time.perf_counter() - begun
    begun = time.perf_counter()
    samples = SampleOrder(0, len(shards)).batch(1_000_000, 1024)[1]
    labels = shards.labels[samples]
    batch = time.perf_counter() - begun
    assert len(labels) == 1024
    memory = own_memory() - before
    print(json.dumps({"open": opened, "batch": batch, "memory": memory}))
    return 0
