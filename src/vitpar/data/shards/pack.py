"""Packing of a source into WebDataset shards with an index. Images are copied byte for byte.

A data set, of images or text, is written under a hidden name next to its folder, and renamed when complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitpar.data.images import BadImage, decode, image_size, image_type
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.index import scan
from vitpar.data.shards.manifest import (
    MANIFEST,
    ROW,
    Manifest,
    SplitEntry,
    read_any_manifest,
    write_manifest,
    write_split,
)
from vitpar.data.sources import Progress, Source, SourceSplit, open_source
from vitpar.errors import DataError
from vitpar.io import stand_in, write_text
from vitpar.text import printable, shown

SHARD_SAMPLES = 5000
"""Default number of images in a shard; half a gigabyte of ImageNet."""
SKIPPED = "skipped.txt"
"""File in a data set that lists the images that `skip_damaged` left out, a sentence each."""
LEFTOVERS = ("lock", "*.rows", "*.skipped", "*.ids", "*.partial-ids", "*.ends")
"""Patterns of files of a packing run that are not part of the data set."""
_KEPT = ("*.tar", "*.tokens", "*.ids", "*.partial-ids")  # files that another run continues with


def check_destination(destination: str | Path, overwrite: bool) -> None:
    """Raise DataError unless a data set may be packed into `destination`.

    overwrite: whether to replace an existing data set.
    """
    target = Path(destination).resolve()
    if target.exists() and not target.is_dir():
        raise DataError(f"'{target}' is a file: choose a folder to pack into")
    if os.path.ismount(target):
        raise DataError(f"'{target}' is a mount point and cannot be replaced: choose a folder inside it")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not (target / MANIFEST).exists():
        raise DataError(f"'{target}' is not empty and not a data set: choose another folder")
    if not overwrite:
        raise DataError(f"'{target}' is an existing data set: choose another folder, or replace it with --overwrite")
    if "vitpar_dataset" not in read_any_manifest(target):
        raise DataError(f"'{target / MANIFEST}' was not written by vitpar: choose another folder")


def stamps(source: Path) -> list[tuple[str, int, int]]:
    """Return the files of a source with sizes in bytes and modification times in ns.

    They identify the source and reveal changes to it.
    """
    paths = [source, *(sorted(source.iterdir()) if source.is_dir() else ())]
    return [(str(path.resolve()), (s := path.stat()).st_size, s.st_mtime_ns) for path in paths if path.is_file()] + [
        (str(source.resolve()), 0, 0)
    ]


@contextmanager
def packing_into(destination: str | Path, overwrite: bool, digest: str) -> Iterator[Path]:
    """Lock a hidden folder next to `destination`, yield its path, and rename it to `destination` at the end.

    It contains the files of an interrupted run if that had the same `digest`, and is emptied otherwise. If the run
    fails, it stays if another run can continue with its files.

    overwrite: whether to replace an existing data set.
    digest: checksum of the source and the settings.

    Raises DataError if another process holds the lock, or the folder cannot be written.
    """
    target = Path(destination).resolve()
    partial = target.with_name(f".{target.name}.packing")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with (partial / "lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"another process is packing into '{target}': wait for it, or stop it") from None
            except OSError:  # the file system has no locks
                pass
            lock.seek(0)
            if lock.read() != digest:
                for path in partial.iterdir():
                    if path.name != "lock":
                        path.unlink()
                lock.truncate(0)
                lock.write(digest)
                lock.flush()
            try:
                yield partial
                check_destination(target, overwrite)  # again, since packing may have taken hours
                old = None
                if target.exists() and any(target.iterdir()):
                    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
                    target.rename(old)
                partial.replace(target)
                for path in [path for pattern in LEFTOVERS for path in target.glob(pattern)]:
                    path.unlink()
                if old is not None:
                    shutil.rmtree(old)
            finally:
                if not any(path.stat().st_size for pattern in _KEPT for path in partial.glob(pattern)):
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot write '{destination}': {error.strerror or error}; rerun the command to resume"
        ) from error


@dataclass(frozen=True)
class Reencode:
    """Conversion of large images to smaller JPEGs. Other images are left as they are.

    Raises DataError for a setting out of its range.
    """

    short_side: int
    """Largest shorter side in pixels; images above it are resized to it."""
    quality: int = 90
    """JPEG quality, 1 to 100."""

    def __post_init__(self) -> None:
        if self.short_side < 1:
            raise DataError(f"the shorter side is {self.short_side} pixels: choose 1 or more")
        if not 1 <= self.quality <= 100:
            raise DataError(f"JPEG quality {self.quality} is out of range: choose from 1 to 100")

    def __call__(self, data: bytes) -> bytes:
        """Return an encoded image, unchanged or converted to a smaller JPEG. Raises BadImage."""
        width, height = image_size(data)
        if min(width, height) <= self.short_side:
            return data
        image = Image.fromarray(decode(data))  # upright, because the Exif orientation is not kept
        scale = self.short_side / min(image.size)
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        file = io.BytesIO()
        image = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        image.save(file, "JPEG", quality=self.quality)
        return file.getvalue()


def pack(
    source: str | Path,
    destination: str | Path,
    *,
    val_fraction: float | None = None,
    shard_samples: int = SHARD_SAMPLES,
    reencode: Reencode | None = None,
    seed: int = 0,
    overwrite: bool = False,
    workers: int = 2,
    progress: Progress | None = None,
    skip_damaged: bool = False,
    decode_images: bool = True,
    opened: Callable[[Source], None] = lambda source: None,
) -> Manifest:
    """Pack `source` into the folder `destination` and return the manifest. The same input gives the same bytes.

    Everything is written into a hidden folder next to `destination`, which is renamed to it when complete. If a run is
    interrupted, the next run with the same arguments reuses the complete shards in that folder.

    source: any source that `vitpar.data.sources` supports.
    val_fraction: fraction of every class that becomes `val` if the source has no such split; 0.2 if None.
    shard_samples: images in a shard; the last shard of a split may have fewer.
    reencode: conversion of large images to smaller ones; None for none.
    seed: seed of the carved `val` split and of the shuffle that mixes the classes over the training shards.
    overwrite: whether to replace an existing data set.
    workers: number of shards that are written at a time.
    progress: called as samples are packed.
    skip_damaged: whether to leave out files that are no images or damaged, and list them in SKIPPED, instead of raising
        DataError.
    decode_images: whether to decode every image, which finds damaged ones; otherwise only their headers are read.
    opened: called with the opened source before anything is written.

    Raises DataError for a source that cannot be read, bytes that are no image, a destination that is not empty or
    cannot be written, and if another process is packing into the same destination.
    """
    if shard_samples < 1:
        raise DataError(f"shard size {shard_samples} is not a positive number of samples")
    check_destination(destination, overwrite)
    try:
        contents = open_source(source, val_fraction=val_fraction, seed=seed, progress=progress)
        settings = [shard_samples, seed, reencode and asdict(reencode), stamps(Path(source)), decode_images]
    except OSError as error:
        raise DataError(f"cannot read '{error.filename or source}': {error.strerror}") from None
    opened(contents)
    # Of the source's files, and of the settings that decide the bytes of the shards.
    digest = hashlib.sha256(json.dumps([settings, *contents.classes]).encode())
    for name, split in contents.splits.items():
        digest.update(f"{name} {len(split.labels)}\n".encode() + split.labels.tobytes())
        for i in range(len(split.labels)):
            digest.update(os.fsencode(f"{split.name(i)}\n"))
    with packing_into(destination, overwrite, digest.hexdigest()) as folder:
        packing = _Packing(contents, folder, shard_samples, reencode, seed, progress, skip_damaged, decode_images)
        return packing.run(workers)


class _Stopped(Exception):
    """Raised to stop writing a shard after another one failed."""


@dataclass
class _Packing:
    """Writer of those shards of a source that a folder does not have yet. Other fields are arguments of `pack`."""

    source: Source
    folder: Path
    shard_samples: int
    reencode: Reencode | None
    seed: int
    progress: Progress | None
    skip_damaged: bool
    decode_images: bool

    def run(self, workers: int) -> Manifest:
        self._lock, self._stopped = threading.Lock(), False
        splits = {}
        for name, split in self.source.splits.items():
            # Shuffle training samples so that a shard has images of many classes; evaluation keeps the source's order.
            order = np.arange(len(split.labels))
            if name == "train":
                order = SampleOrder(self.seed, len(order), block=split.block, window=split.window).samples(0, order)
            splits[name] = self._split(name, split.subset(order), workers)
            if not splits[name].samples:
                raise DataError(
                    f"none of the {len(order):,} images of the split '{name}' can be read: check the source"
                )
        if skipped := sorted(self.folder.glob("*.skipped")):
            write_text(self.folder / SKIPPED, "".join(path.read_text() for path in skipped))
        names = None if self.source.class_names is None else [*self.source.class_names]
        manifest = Manifest(classes=[*self.source.classes], class_names=names, labels="cls", splits=splits)
        write_manifest(self.folder, manifest)
        return manifest

    def _split(self, name: str, split: SourceSplit, workers: int) -> SplitEntry:
        self._done, samples = 0, len(split.labels)
        parts = [
            range(start, min(start + self.shard_samples, samples)) for start in range(0, samples, self.shard_samples)
        ]
        paths = [self.folder / f"{name}-{number:06d}.tar" for number in range(len(parts))]
        workers = 1 if split.window else max(1, workers)  # several shards at once would read the same blocks repeatedly
        with ThreadPoolExecutor(workers, thread_name_prefix="vitpar-pack") as pool:
            tasks = [pool.submit(self._shard, name, split, *task) for task in zip(paths, parts, strict=True)]
            try:
                wait(tasks, return_when=FIRST_EXCEPTION)
                tables = [task.result() for task in tasks if task.done()]
            finally:
                self._stopped = True
                pool.shutdown(wait=True, cancel_futures=True)
        self._stopped = False
        return write_split(self.folder, name, paths, tables, len(self.source.classes))

    def _shard(self, name: str, split: SourceSplit, path: Path, samples: range) -> np.ndarray:
        """Return the index rows of the shard at `path`, ROW [samples], after writing it unless it exists.

        samples: numbers of its samples in the split.
        """
        table_path, skipped_path = path.with_suffix(".rows"), path.with_suffix(".skipped")
        # A shard that exists is complete, since it is renamed last. It may lack images only if that is allowed now.
        if path.exists() and table_path.exists() and (self.skip_damaged or not skipped_path.exists()):
            self._report(name, len(samples), len(split.labels))
            # Not np.load: it parses the header as Python, which fails in threads of Python before 3.11.8
            # (python/cpython#106905).
            return np.fromfile(table_path, ROW)
        partial = path.with_suffix(".partial")
        skipped = self._write(partial, name, split, samples)
        table = scan(partial).rows
        kept = np.setdiff1d(samples, list(skipped))
        assert np.array_equal(table["label"], split.labels[kept]), f"{path} has other labels than were packed"
        table.tofile(table_path)
        skipped_path.unlink(missing_ok=True)
        if skipped:
            write_text(skipped_path, "".join(f"{printable(why)}\n" for why in skipped.values()))
        partial.replace(path)
        return table

    def _write(self, path: Path, name: str, split: SourceSplit, samples: range) -> dict[int, str]:
        """Write a shard. Return the samples that are left out, and why."""
        from webdataset import TarWriter  # slow: imports torch and more

        skipped = dict[int, str]()
        # The writer sets a fixed user, group and mode, and mtime=0 fixes the time, so the bytes depend only on the
        # samples.
        with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
            for i in samples:
                if self._stopped:
                    raise _Stopped
                data = split.read(i)
                try:
                    data = self._checked(data, split.name(i))
                    writer.write({"__key__": f"{i:08d}", "cls": b"%d" % split.labels[i], str(image_type(data)): data})
                except BadImage as error:
                    if not self.skip_damaged:
                        raise DataError(f"{error}, or skip such files with --skip-damaged") from None
                    skipped[i] = str(error)
                self._report(name, 1, len(split.labels))
        return skipped

    def _checked(self, data: bytes, name: str) -> bytes:
        """Return an encoded image, re-encoded if `reencode` is set. Raises BadImage for bytes that are no image."""
        if image_type(data) is None:
            advice = stand_in(data[:256]) or "remove it, or convert it to JPEG or PNG"
            raise BadImage(f"'{shown(name)}' is not a supported image type: {advice}")
        try:
            converted = self.reencode(data) if self.reencode else data
            if self.decode_images and converted is data:  # a converted image was decoded
                decode(data)
            image_size(data := converted)
        except BadImage as error:
            raise BadImage(f"'{shown(name)}' is damaged ({error}): replace or remove it") from None
        return data

    def _report(self, name: str, more: int, samples: int) -> None:
        with self._lock:
            self._done += more
            if self.progress:
                self.progress(name, self._done, samples)
