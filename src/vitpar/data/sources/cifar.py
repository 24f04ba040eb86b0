"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) as published: the archive, or the folder it unpacks to, in its binary or its
Python version. Pixels are kept as PNG.

The Python version consists of pickles, which could run code: only arrays and plain values are read from them.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from vitpar.data.sources.source import Source, SourceSplit, read_file
from vitpar.errors import DataError

_PIXELS = 3 * 32 * 32
_LARGEST = 1 << 30  # bytes of a member
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
Files = dict[str, Callable[[], bytes]]


def cifar_files(path: Path) -> Files | None:
    """What reads the files of CIFAR at `path`, by their names; None if it is something else."""
    files: Files
    if path.is_dir():
        files = {entry.name: partial(read_file, entry) for entry in path.iterdir() if entry.is_file()}
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        try:
            with tarfile.open(path) as tar:
                names = [member.name for member in tar if member.isreg() and member.size < _LARGEST]
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            raise DataError(f"'{path}' is not a whole tar file ({error}): fetch it again") from None
        files = {PurePosixPath(name).name: partial(_member, path, name) for name in names}
    else:
        return None
    known = ({"test_batch", *_BATCHES}, {"test_batch.bin"}, {"train", "test", "meta"}, {"train.bin", "test.bin"})
    return files if any(names <= set(files) for names in known) else None


def cifar(files: Files) -> Source:
    """The source whose files are `files`."""
    fine = "train" in files or "train.bin" in files
    train, test = (("train",), ("test",)) if fine else (_BATCHES, ("test_batch",))
    binary = f"{test[0]}.bin" in files
    read = _binary if binary else _pickled
    parts = {
        split: [read(files, f"{name}.bin" if binary else name, fine) for name in names]
        for split, names in (("train", train), ("val", test))
    }
    splits = {
        split: _split(split, np.concatenate([pixels for pixels, _ in found]), np.concatenate([ls for _, ls in found]))
        for split, found in parts.items()
    }
    classes = _classes(files, fine, binary)
    most = max(int(split.labels.max()) for split in splits.values())
    if most >= len(classes):
        raise DataError(f"label {most} of CIFAR is outside its {len(classes)} classes: fetch it again")
    return Source(classes, splits)


def _split(name: str, pixels: np.ndarray, labels: np.ndarray) -> SourceSplit:
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    def read(i: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(images[i])).save(file, "PNG")
        return file.getvalue()

    return SourceSplit([f"{name}/{i}" for i in range(len(labels))], labels.astype(np.int32), read)


def _classes(files: Files, fine: bool, binary: bool) -> list[str]:
    name = ("fine_label_names.txt" if fine else "batches.meta.txt") if binary else ("meta" if fine else "batches.meta")
    if name not in files:
        return [str(label) for label in range(100 if fine else 10)]
    if binary:
        return files[name]().decode().split()
    return [word.decode() for word in _loaded(files, name)[b"fine_label_names" if fine else b"label_names"]]


def _binary(files: Files, name: str, fine: bool) -> tuple[np.ndarray, np.ndarray]:
    """Records of a label, or a coarse and a fine one, and the pixels."""
    data, labels = np.frombuffer(_data(files, name), np.uint8), 2 if fine else 1
    if not len(data) or len(data) % (labels + _PIXELS):
        raise DataError(f"'{name}' of CIFAR has {len(data)} bytes, no whole number of images: fetch it again")
    records = data.reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1]


def _pickled(files: Files, name: str, fine: bool) -> tuple[np.ndarray, np.ndarray]:
    found = _loaded(files, name)
    try:
        pixels, labels = found[b"data"], np.array(found[b"fine_labels" if fine else b"labels"], np.int64)
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), _PIXELS):
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError):
        raise DataError(f"'{name}' of CIFAR does not hold images and labels: fetch it again") from None
    return pixels, labels


def _data(files: Files, name: str) -> bytes:
    if name not in files:
        raise DataError(f"CIFAR's file '{name}' is missing: fetch it again")
    return files[name]()


def _loaded(files: Files, name: str) -> Any:
    try:
        return _Plain(io.BytesIO(_data(files, name)), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise DataError(f"'{name}' of CIFAR cannot be read ({error}): fetch it again") from None


class _Plain(pickle.Unpickler):
    """Arrays, and what pickle makes without help."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.ndarray.__reduce__(np.empty(0))[0]  # where numpy keeps it changes
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding: text.encode("latin1")
        raise DataError(f"it asks for {module}.{name}, which CIFAR's files have no need of")


def _member(path: Path, name: str) -> bytes:
    try:
        with tarfile.open(path) as tar:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"cannot read '{name}' of '{path}': {error}") from None
