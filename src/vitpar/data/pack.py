"""Pack a source into WebDataset shards: images byte for byte, each beside its label, and an index of them all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vitpar.data.images import BadImage, image_size, image_type
from vitpar.data.index import (
    MANIFEST,
    Manifest,
    ShardEntry,
    SplitEntry,
    build_index,
    index_path,
    read_manifest,
    write_manifest,
)
from vitpar.data.order import permutation
from vitpar.data.sources import Source, SourceSplit, open_source
from vitpar.errors import DataError

SHARD_SAMPLES = 5000  # half a gigabyte of ImageNet

Progress = Callable[[str, int, int], None]
"""Called as (split, samples packed, samples in all)."""


def pack(
    source: str | Path,
    destination: str | Path,
    *,
    val_fraction: float | None = None,
    shard_samples: int = SHARD_SAMPLES,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Pack `source` (see `vitpar.data.sources`) into the folder `destination`; the same input gives the same bytes.

    val_fraction: part of every class that becomes `val` when the source has no such split (0.2 if None).
    shard_samples: images in a shard, the last of a split may have fewer. seed: of the carved split and of the shuffle
    that mixes the classes over the training shards. overwrite: replace a packed data set that is there. All is
    written into a folder beside `destination` that takes its name when it is complete, so an interrupted run leaves
    no data set that looks whole.

    Raises DataError for a source that cannot be read, bytes that are no image, and a destination that is not empty.
    """
    if shard_samples < 1:
        raise DataError(f"shard size {shard_samples} is not a positive number of samples")
    target = Path(destination).resolve()
    _check_destination(target, overwrite)
    opened = open_source(source, val_fraction=val_fraction, seed=seed)
    partial = target.with_name(f".{target.name}.packing-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        manifest = _write(opened, partial, shard_samples, seed, progress)
        _put_in_place(partial, target)
    except OSError as error:
        raise DataError(f"cannot write '{destination}': {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _check_destination(target: Path, overwrite: bool) -> None:
    if target.exists() and not target.is_dir():
        raise DataError(f"'{target}' is a file: choose a folder to pack into")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / MANIFEST).exists():
        raise DataError(f"'{target}' is not empty and holds no packed data set: choose another folder")
    if not overwrite:
        raise DataError(f"'{target}' holds a packed data set: choose another folder, or --overwrite to replace it")
    read_manifest(target)  # raises for a `dataset.json` that is not ours


def _put_in_place(partial: Path, target: Path) -> None:
    if not target.exists() or not any(target.iterdir()):
        partial.replace(target)
        return
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)


def _write(source: Source, folder: Path, shard_samples: int, seed: int, progress: Progress | None) -> Manifest:
    splits = {}
    for name, split in source.splits.items():
        # Training samples are shuffled so that neighbours in a shard are of mixed classes; evaluation keeps the
        # source's order.
        samples = len(split.labels)
        order = permutation(seed, 0, samples) if name == "train" else np.arange(samples)
        splits[name] = _write_split(name, split.subset(order), folder, len(source.classes), shard_samples, progress)
    manifest = Manifest(classes=list(source.classes), splits=splits)
    write_manifest(folder, manifest)
    return manifest


def _write_split(
    name: str, split: SourceSplit, folder: Path, num_classes: int, shard_samples: int, progress: Progress | None
) -> SplitEntry:
    samples = len(split.labels)
    shards, tables = [], []
    for number, start in enumerate(range(0, samples, shard_samples)):
        path = folder / f"{name}-{number:06d}.tar"
        stop = min(start + shard_samples, samples)
        _write_shard(path, split, range(start, stop), lambda done: progress and progress(name, done, samples))
        table = build_index(path)
        assert np.array_equal(table["label"], split.labels[start:stop]), f"{path} does not hold what was written"
        table["shard"] = number
        tables.append(table)
        shards.append(ShardEntry(file=path.name, samples=stop - start, bytes=path.stat().st_size))
    np.save(index_path(folder, name), np.concatenate(tables))
    per_class = np.bincount(split.labels, minlength=num_classes).tolist()
    return SplitEntry(shards=shards, samples=samples, per_class=per_class)


def _write_shard(path: Path, split: SourceSplit, samples: range, report: Callable[[int], object]) -> None:
    from webdataset import TarWriter  # imports torch and more: not before it is needed

    # User, group and mode are fixed by the writer, and the time is fixed here, so that only the samples decide the
    # bytes.
    with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
        for i in samples:
            data = split.read(i)
            extension = image_type(data)
            if extension is None:
                raise DataError(
                    f"'{split.names[i]}' is not an image of a known type: remove it or convert it to JPEG or PNG"
                )
            try:
                image_size(data)
            except BadImage as error:
                raise DataError(f"'{split.names[i]}' is damaged ({error}): replace or remove it") from None
            writer.write({"__key__": f"{i:08d}", "cls": b"%d" % split.labels[i], extension: data})
            report(i + 1)
