"""A packed data set: ordinary WebDataset tar shards, and an index by which any sample is read with one `pread`.

folder/
  dataset.json          classes, and for every split its shards with their sample and byte counts
  train-000000.tar …    00000000.cls, 00000000.jpg, 00000001.cls, 00000001.png, …
  train.index.npy       one row of ROW a sample, in shard order: where its image lies, and its label
  val-000000.tar …, val.index.npy
"""

import json
import os
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from vitpar.data.images import IMAGE_TYPES
from vitpar.errors import DataError, nearest

ROW = np.dtype([("shard", "<i4"), ("offset", "<i8"), ("size", "<i8"), ("label", "<i4")])
MANIFEST = "dataset.json"
_OPEN_FILES = 256  # a data set may have more shards than a process may have open files


class ShardEntry(BaseModel):
    """One tar file of a split."""

    model_config = ConfigDict(extra="forbid")
    file: str
    samples: NonNegativeInt
    bytes: NonNegativeInt


class SplitEntry(BaseModel):
    """One split: its shards in index order and its sample counts."""

    model_config = ConfigDict(extra="forbid")
    shards: list[ShardEntry]
    samples: NonNegativeInt
    per_class: list[NonNegativeInt]


class Manifest(BaseModel):
    """What `dataset.json` holds."""

    model_config = ConfigDict(extra="forbid")
    vitpar_dataset: Literal[1] = 1
    classes: list[str]
    splits: dict[str, SplitEntry]


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of a packed data set. Raises DataError when `folder` holds none, or a damaged one."""
    path = Path(folder) / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"no packed data set at '{folder}': make one with `vitpar data pack SOURCE {folder}`") from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(f"'{path}' is damaged or of another version ({where}: {first['msg']}): pack it again") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `dataset.json`; the packer does so last."""
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump(), indent=1) + "\n", encoding="utf-8")


def index_path(folder: Path, split: str) -> Path:
    """Where the index of a split lies."""
    return folder / f"{split}.index.npy"


def build_index(shard: Path) -> np.ndarray:
    """Scan the headers of one tar file: its samples in order as ROW [samples], with column `shard` left at 0.

    An image and its `.cls` are paired by their key. Raises DataError for a member without its partner, or a label
    that is no integer.
    """
    rows: list[tuple[int, int, int, int]] = []
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(shard, "r:") as tar, shard.open("rb") as file:
        for member in tar:
            key, _, extension = member.name.rpartition(".")
            if extension == "cls":
                text = os.pread(file.fileno(), member.size, member.offset_data)
                try:
                    labels[key] = int(text)
                except ValueError:
                    raise DataError(f"label {text!r} of '{shard.name}/{key}' is not an integer") from None
            elif extension in IMAGE_TYPES:
                images[key] = (member.offset_data, member.size)
            if key in images and key in labels:
                rows.append((0, *images.pop(key), labels.pop(key)))
    for lonely, partner in ((images, "label (.cls)"), (labels, "image")):
        if lonely:
            raise DataError(f"sample '{shard.name}/{next(iter(lonely))}' has no {partner}")
    return np.array(rows, dtype=ROW)


class ShardSet:
    """One split of a packed data set, opened for reading samples by number, from any thread.

    classes: class names, in label order. labels: int32 [samples], read-only. per_class: samples of each class. bytes:
    of all shards.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest, rows: np.ndarray) -> None:
        entry = manifest.splits[split]
        self.folder = folder
        self.split = split
        self.classes = tuple(manifest.classes)
        self.per_class = tuple(entry.per_class)
        self.files = tuple(folder / shard.file for shard in entry.shards)
        self.bytes = sum(shard.bytes for shard in entry.shards)
        self.labels: NDArray[np.int32] = rows["label"]
        self._shard, self._offset, self._size = rows["shard"], rows["offset"], rows["size"]
        self._open_file = lru_cache(maxsize=_OPEN_FILES)(_OpenFile)

    @classmethod
    def open(cls, folder: str | Path, split: str) -> "ShardSet":
        """Open `split` of the data set in `folder`: reads the manifest, the index and the shards' sizes, but no shard.

        Raises DataError for a missing, damaged or empty data set, an unknown split, a shard that is missing or not of
        its size, an index that does not fit the shards, and a label outside the classes.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        if split not in manifest.splits:
            known = ", ".join(manifest.splits) or "none"
            raise DataError(f"no split '{split}' in '{folder}'{nearest(split, manifest.splits)}: it has {known}")
        entry = manifest.splits[split]
        if not entry.samples:
            raise DataError(f"split '{split}' of '{folder}' is empty: pack it again from a source with images")
        for shard in entry.shards:
            _check_shard(folder / shard.file, shard.bytes)
        shards = cls(folder, split, manifest, _load_rows(folder, split, entry))
        wrong = np.flatnonzero((shards.labels < 0) | (shards.labels >= len(shards.classes)))
        if wrong.size:
            i = int(wrong[0])
            raise DataError(
                f"label {shards.label(i)} of sample '{shards.name(i)}' is outside the {len(shards.classes)} classes "
                f"of '{folder}': correct the source and pack it again"
            )
        return shards

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> bytes:
        """The encoded image of sample `i`. Raises DataError when the shard is gone or too short."""
        path, size = self.files[self._shard[i]], int(self._size[i])
        try:
            data = self._open_file(path).read(size, int(self._offset[i]))
        except OSError as error:
            raise DataError(f"cannot read '{path}': {error.strerror}") from None
        if len(data) != size:
            raise DataError(f"'{path}' has shrunk since it was packed: pack '{self.folder}' again")
        return data

    def label(self, i: int) -> int:
        """The class number of sample `i`."""
        return int(self.labels[i])

    def name(self, i: int) -> str:
        """`shard file/sample key` of sample `i`, for messages; the key stands in the tar header before the image."""
        path, offset = self.files[self._shard[i]], int(self._offset[i])
        try:
            header = self._open_file(path).read(tarfile.BLOCKSIZE, offset - tarfile.BLOCKSIZE)
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (OSError, tarfile.HeaderError):
            return f"{path.name}/byte {offset}"
        return f"{path.name}/{member.name.rpartition('.')[0]}"


class _OpenFile:
    """A file that is closed with the last reference to it, so that no thread loses one it is reading from."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def _check_shard(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError:
        raise DataError(f"shard '{path}' is missing: restore it or pack the data set again") from None
    if found != size:
        raise DataError(
            f"shard '{path}' has {found} bytes but {size} were packed: restore it or pack the data set again"
        )


def _load_rows(folder: Path, split: str, entry: SplitEntry) -> np.ndarray:
    """The memory-mapped index of a split, once it is known to fit the shards."""
    path = index_path(folder, split)
    try:
        rows = np.load(path, mmap_mode="r").view(np.ndarray)  # a plain array: np.memmap's own indexing is slow
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"index '{path}' cannot be read ({error}): pack the data set again") from None
    samples = [shard.samples for shard in entry.shards]
    bytes_ = np.array([shard.bytes for shard in entry.shards])
    fits = (
        rows.dtype == ROW
        and rows.shape == (entry.samples,)
        and np.array_equal(rows["shard"], np.repeat(np.arange(len(samples)), samples))
        and bool((rows["offset"] >= tarfile.BLOCKSIZE).all() and (rows["size"] > 0).all())
        and bool((rows["offset"] + rows["size"] <= bytes_[rows["shard"]]).all())
    )
    if not fits:
        raise DataError(f"index '{path}' does not fit the shards in {MANIFEST}: pack the data set again")
    return rows
