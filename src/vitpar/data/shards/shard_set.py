"""Random access to the samples of a split: each is read with one request and compared with its checksum."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from vitpar.data.images import BadImage
from vitpar.data.shards.manifest import Manifest, SplitEntry, read_manifest, read_rows
from vitpar.errors import DataError
from vitpar.io import open_regular, stat_regular
from vitpar.object_store import ObjectPath, parse_place
from vitpar.text import nearest, shown

DAMAGED = "its checksum differs from the index: restore the shard, or index it again"
"""Words about a sample whose bytes are not those that were indexed."""
_OPEN_FILES = 256  # limit, because a data set may have more shards than a process may have open files


class ShardSet:
    """Split of a data set, opened for reading samples by number from any thread.

    folder: folder of the data set, on a disk or in object storage.
    split: name of the split.
    classes: class identifiers, in label order.
    class_names: human-readable names of the classes, in the same order.
    per_class: number of samples of each class.
    files: paths of the shards.
    bytes: size of all shards in bytes.
    fingerprint: checksum of the samples and their order.
    labels: int32 [samples], read-only.
    """

    checked = True
    """Whether `read` compares the bytes with a checksum."""
    _renumbered: tuple[tuple[str, ...], tuple[int, ...]] | None = None  # arguments of `relabelled`

    def __init__(self, folder: Path | ObjectPath, split: str, manifest: Manifest, rows: np.ndarray) -> None:
        entry = manifest.splits[split]
        self.folder = folder
        self.split = split
        self.classes = tuple(manifest.classes)
        self.class_names: tuple[str, ...] | None = tuple(manifest.class_names or manifest.classes)
        self.per_class = tuple(entry.per_class)
        self.files = tuple(folder / shard.file for shard in entry.shards)
        self.bytes = sum(shard.bytes for shard in entry.shards)
        self.fingerprint = entry.index_sha256
        self.labels: NDArray[np.int32] = rows["label"]
        self._rows = rows
        self._shard, self._offset, self._size, self._crc = (rows[name] for name in ("shard", "offset", "size", "crc"))
        self._stamps = _stamps(folder, self.files)
        for path, shard in zip(self.files, entry.shards, strict=True):
            if (size := self._stamps[path][0]) != shard.bytes:
                raise DataError(
                    f"shard '{path}' has {size} bytes but {shard.bytes} were indexed: restore it, or rewrite the index "
                    f"with `vitpar data index {folder}`"
                )
        self._open_file = lru_cache(maxsize=_OPEN_FILES)(self._opened)

    @classmethod
    def open(cls, folder: str | Path | ObjectPath, split: str) -> Self:
        """Open `split` of the data set in `folder`.

        Only the manifest, the index and the sizes of the shards are read.

        Raises DataError for a missing, damaged or empty data set, an unknown split, a shard that is missing or has
        another size than in the manifest, and an index that does not fit the shards.
        """
        folder = parse_place(folder)
        manifest = read_manifest(folder)
        if split not in manifest.splits:
            known = shown(", ".join(manifest.splits) or "none")
            raise DataError(f"no split '{split}' in '{folder}'{nearest(split, manifest.splits)}: it has {known}")
        entry = manifest.splits[split]
        if not entry.samples:
            raise DataError(f"split '{split}' of '{folder}' is empty: pack it again from a source with images or text")
        cls._refuse_kind(folder, manifest, entry)
        return cls(folder, split, manifest, read_rows(folder, split, entry))

    @classmethod
    def _refuse_kind(cls, folder: Path | ObjectPath, manifest: Manifest, entry: SplitEntry) -> None:
        """Raise DataError for a split of another kind of data."""
        if manifest.text is not None:
            raise DataError(f"'{folder}' holds text, but images are needed: name images, or a task of text (mlm, span)")
        if len(entry.per_class) != len(manifest.classes):
            raise DataError(
                f"a split of '{folder}' has {len(entry.per_class)} classes but the manifest names "
                f"{len(manifest.classes)}: rewrite it with `vitpar data index {folder}`"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder, the split and another numbering of the classes: the set is opened again."""
        return _reopened, (type(self), self.folder, self.split, self.fingerprint, self._renumbered)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        """Number of classes, including those without samples."""
        return len(self.classes)

    @property
    def names_of_classes(self) -> tuple[tuple[str, ...], ...]:
        """Lists of names by which the classes are known: human-readable names, and identifiers."""
        return tuple(dict.fromkeys(names for names in (self.class_names, self.classes) if names))

    def relabelled(self, names: Sequence[str], numbers: Sequence[int]) -> ShardSet:
        """Return the set with the classes of a model.

        names: names of all classes of the model.
        numbers: number in the model of each class of the set.
        """
        changed = object.__new__(ShardSet)
        changed.__dict__.update(self.__dict__)
        changed._renumbered = tuple(names), tuple(numbers)
        changed.classes = changed.class_names = tuple(names)
        changed.labels = np.asarray(numbers, np.int32)[self.labels]
        changed.per_class = tuple(np.bincount(changed.labels, minlength=len(names)).tolist())
        return changed

    @property
    def place(self) -> str:
        """Folder, for messages."""
        return str(self.folder)

    def read(self, i: int) -> bytes:
        """Return the encoded image of sample `i`.

        Raises DataError if its shard is missing, too short, or was replaced since the data set was opened.
        Raises BadImage if the bytes are not those that were indexed.
        """
        data = self._read_range(int(self._shard[i]), int(self._offset[i]), int(self._size[i]))
        if zlib.crc32(data) != int(self._crc[i]):
            raise BadImage(DAMAGED)
        return data

    def _read_range(self, shard: int, offset: int, size: int) -> bytes:
        """Return bytes of a shard. Raises DataError if it is missing, too short, or was replaced."""
        path = self.files[shard]
        try:
            if isinstance(path, ObjectPath):
                version = self._stamps[path][1]
                data = path.read_range(offset, size, None if version is None else str(version))
            else:
                file = self._open_file(path)  # held while it is read, since another thread may push it out of the cache
                data = os.pread(file.fileno(), size, offset)
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from None
        _refuse_other(path, (size, None), (len(data), None))
        return data

    def complaint(self, i: int, error: BadImage) -> str:
        """Return a message that names sample `i` and says what is wrong with it."""
        return f"sample '{shown(self.name(i))}' of '{self.folder}': {error}"

    def refuse_changed(self) -> None:
        """Raise DataError if a shard is missing or was replaced since the data set was opened."""
        for path, stamp in _stamps(self.folder, self.files).items():
            _refuse_other(path, self._stamps[path], stamp)

    def rows_of(self, number: int) -> np.ndarray:
        """Return the index rows of shard `number`, `manifest.ROW` [samples], in order."""
        return self._rows[slice(*np.searchsorted(self._shard, [number, number + 1]))]

    def label(self, i: int) -> int:
        """Return the class number of sample `i`."""
        return int(self.labels[i])

    def name(self, i: int) -> str:
        """Return `shard file/sample key` of sample `i`, for messages.

        The key is read from the tar header before the image. If that fails, the byte offset takes its place.
        """
        path, offset = self.files[self._shard[i]], int(self._offset[i])
        try:
            header = self._read_range(int(self._shard[i]), offset - tarfile.BLOCKSIZE, tarfile.BLOCKSIZE)
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (DataError, tarfile.HeaderError):
            return f"{path.name}/byte {offset}"
        return f"{path.name}/{member.name.rpartition('.')[0]}"

    def _opened(self, path: Path) -> BinaryIO:
        file = open_regular(path)
        _refuse_other(path, self._stamps[path], _stamp(os.fstat(file.fileno())))
        return file


def _reopened(
    kind: type[ShardSet],
    folder: Path | ObjectPath,
    split: str,
    fingerprint: str,
    renumbered: tuple[tuple[str, ...], tuple[int, ...]] | None,
) -> ShardSet:
    """Open a set that was pickled. Raises DataError if it cannot be opened, or was replaced since."""
    shards = kind.open(folder, split)
    if shards.fingerprint != fingerprint:
        raise DataError(f"'{folder}' was replaced while the command started: start again")
    return shards if renumbered is None else shards.relabelled(*renumbered)


Stamp = tuple[int, int | str | None]
"""Size in bytes, and modification time in ns of a file or version of an object. Inodes are not included, since some
mounts change them."""


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns


def _refuse_other(path: Path | ObjectPath, stamp: Stamp, now: Stamp) -> None:
    if stamp != now:
        raise DataError(
            f"shard '{path}' was changed during use: restore it, or rewrite the index with `vitpar data "
            f"index {path.parent}` and start again"
        )


def _stamps(folder: Path | ObjectPath, files: Sequence[Path | ObjectPath]) -> dict[Path | ObjectPath, Stamp]:
    """Return the stamp of each shard. Objects are not asked one by one: the folder is listed.

    Raises DataError for a shard that is missing or cannot be read.
    """
    stamps: dict[Path | ObjectPath, Stamp] = {}
    path: Path | ObjectPath = folder
    try:
        listed = folder.files() if isinstance(folder, ObjectPath) else {}
        for path in files:
            if isinstance(path, ObjectPath):
                stat = listed[str(path).removeprefix(f"{folder}/")]
                stamps[path] = stat.size, stat.version
            else:
                stamps[path] = _stamp(stat_regular(path))
    except (FileNotFoundError, KeyError):
        name = shown(path, len(str(path)))  # shows the end of a long path
        raise DataError(f"shard '{name}' is missing: restore it or pack the data set again") from None
    except OSError as error:
        raise DataError(f"cannot read '{shown(path, len(str(path)))}': {error.strerror}") from None
    return stamps
