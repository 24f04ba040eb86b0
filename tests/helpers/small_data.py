"""A packed data set of tiny images in seven classes: 35 to train and 17 to validate, so last batches are incomplete."""

import hashlib
import json
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from helpers.tiny_images import saved
from vitpar.data.shards.pack import pack
from vitpar.data.shards.shard_set import ShardSet

CLASSES = 7
TRAIN, VAL = 5, 17
"""Training images per class, and validation images in total."""


def pack_small(folder: Path, *, val: bool = True) -> Path:
    """Write the data set of 10x10 noise images under `folder`, and return the packed folder."""
    draw = np.random.default_rng(0)
    labels = {"train": np.repeat(np.arange(CLASSES), TRAIN)} | ({"val": np.arange(VAL) % CLASSES} if val else {})
    for split, numbers in labels.items():
        for i, label in enumerate(numbers):
            path = folder / "source" / split / f"class{label}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(saved(draw.integers(0, 256, (10, 10, 3), dtype=np.uint8)))
    pack(folder / "source", folder / "packed", shard_samples=12, val_fraction=None if val else 0)
    return folder / "packed"


def first(loader: Iterable[Any], count: int) -> list[Any]:
    """Return the first batches of a loader, whose threads then end."""
    with closing(iter(loader)) as batches:  # type: ignore[type-var]
        return list(islice(batches, count))


def damage(data: Path, split: str, sample: int) -> str:
    """Overwrite the pixels of one packed image without changing its size. Return its name, `shard/key`."""
    shards = ShardSet.open(data, split)
    name, whole = shards.name(sample), shards.read(sample)
    shard, key = name.split("/")
    with tarfile.open(data / shard) as tar:
        offset = tar.getmember(f"{key}.png").offset_data
    with (data / shard).open("r+b") as file:
        file.seek(offset + 20)
        file.write(b"\0" * (len(whole) - 20))
    return name


def rename_classes(data: Path, names: Sequence[str], numbers: Sequence[int] | None = None) -> None:
    """Give the classes of a packed data set other names, and each label the number `numbers[label]`."""
    manifest = json.loads((data / "dataset.json").read_text())
    manifest |= {"classes": list(names), "class_names": None}
    for split, entry in manifest["splits"].items() if numbers else ():
        path = data / f"{split}.index.npy"
        rows = np.load(path)
        rows["label"] = np.array(numbers)[rows["label"]]
        np.save(path, rows)
        entry["index_sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        entry["per_class"] = np.bincount(rows["label"], minlength=len(names)).tolist()
    (data / "dataset.json").write_text(json.dumps(manifest))
