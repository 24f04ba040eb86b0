"""Sources that are arrays of pixels, which are stored as PNG: CIFAR and scikit-learn's digits.

CIFAR-10 and CIFAR-100 (Krizhevsky 2009) are read as published, from the archive or the folder it unpacks to, in the
binary or the Python version. The Python version consists of pickles, which could run code, so they are only recorded.
The digits are 1,797 handwritten digits of 8×8 pixels.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitpar.data.classes import class_names
from vitpar.data.sources.source import Source, SourceSplit, read_file, unpacked, using
from vitpar.errors import DataError
from vitpar.io import decode_utf8

DIGITS = "digits"
"""Name of the source of scikit-learn's digits."""
DIGITS_PACKAGE, INSTALL_DIGITS = "sklearn", "pip install -e '.[digits]'"
"""Module that has the digits, and the command that installs it."""
_PIXELS = 3 * 32 * 32  # bytes of an image of CIFAR
_TEN = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
_HUNDRED = ["train", "test"]
_WORDS = {"batches.meta": 10, "batches.meta.txt": 10, "meta": 100, "fine_label_names.txt": 100}
"""Files with the names of classes, and their number."""
_WHOLE = ({*_TEN}, {"test_batch.bin"}, {*_HUNDRED, "meta"}, {"train.bin", "test.bin"})
"""Sets of files, each of which identifies CIFAR: of 10 or 100 classes, in the Python or the binary version."""
_NAMED = {*_WORDS, *(f"{name}{end}" for name in (*_TEN, *_HUNDRED) for end in ("", ".bin"))}
Files = dict[str, Callable[[], bytes]]
"""Functions that return the contents of files, by file name."""


def digits() -> Source:
    """Return the digits of scikit-learn, without a `val` split. Raises DataError if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(f"the `{DIGITS}` data set needs scikit-learn: {INSTALL_DIGITS}") from None
    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)  # 0..16 -> 0..255
    return Source([str(name) for name in data.target_names], {"train": _split(DIGITS, images, data.target)})


def cifar_files(path: Path) -> Files | None:
    """Return the files of CIFAR in the folder or archive at `path`; None if it is something else."""
    files: Files
    if path.is_dir():
        names = [entry for entry in path.iterdir() if entry.is_file() and entry.name in _NAMED]
        files = {entry.name: partial(read_file, entry) for entry in names}
    elif path.name.endswith((".tar.gz", ".tgz", ".tar")):
        files = {name: partial(bytes, data) for name, data in unpacked(path, _NAMED).items()}
    else:
        return None
    return files if any(names <= set(files) for names in _WHOLE) else None


def cifar(files: Files) -> Source:
    """Return the source that consists of `files`. CIFAR's test split becomes `val`. Raises DataError."""
    count = 100 if "train" in files or "train.bin" in files else 10
    *train, test = _HUNDRED if count == 100 else _TEN
    binary = f"{test}.bin" in files
    read, end = (_binary, ".bin") if binary else (_pickled, "")
    splits = {}
    for split, names in (("train", train), ("val", [test])):
        parts = [_used(files, f"{name}{end}", partial(read, count)) for name in names]
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        splits[split] = _split(split, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)
    classes = [str(label) for label in range(count)]
    if (words := next((name for name in _WORDS if name in files and _WORDS[name] == count), None)) is not None:
        classes = _used(files, words, class_names if words.endswith(".txt") else partial(_names, count))
    most = max(int(split.labels.max()) for split in splits.values())
    if most >= len(classes):
        raise DataError(f"CIFAR label {most} is outside its {len(classes)} classes: fetch it again")
    return Source(classes, splits)


def _split(name: str, images: np.ndarray, labels: np.ndarray) -> SourceSplit:
    """Return a split that encodes images as PNG when they are read.

    images: uint8 [samples, height, width] or [samples, height, width, 3].
    """

    def read(i: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(images[i])).save(file, "PNG")
        return file.getvalue()

    return SourceSplit(lambda i: f"{name}/{i}", labels.astype(np.int32), read)


def _used(files: Files, name: str, use: Callable[[bytes], Any]) -> Any:
    """Return `use` of the content of a file. Raises DataError if that fails."""
    if name not in files:
        raise DataError(f"CIFAR file '{name}' is missing: fetch it again")
    with using(f"CIFAR file '{name}' cannot be read"):
        return use(files[name]())


def _binary(count: int, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and labels of a binary file, whose records have a label, or a coarse and a fine one, and pixels."""
    labels = 2 if count == 100 else 1
    if not data or len(data) % (labels + _PIXELS):
        raise ValueError(f"its {len(data)} bytes are not a multiple of the image size")
    records = np.frombuffer(data, np.uint8).reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1]


def _pickled(count: int, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and labels of a pickled file. Whatever the type of its array, its bytes are taken as pixels."""
    batch = _Recorder(io.BytesIO(data), encoding="bytes").load()
    labels = batch[b"fine_labels" if count == 100 else b"labels"]
    _, shape, dtype, _, pixels = batch[b"data"].state
    if dtype.arguments[0] not in ("u1", b"u1") or shape != (len(labels), _PIXELS) or {*map(type, labels)} != {int}:
        raise ValueError("it lacks images or labels")
    return np.frombuffer(pixels, np.uint8).reshape(shape), np.array(labels, np.int64)


def _names(count: int, data: bytes) -> list[str]:
    words = _Recorder(io.BytesIO(data), encoding="bytes").load()
    return [decode_utf8(word) for word in words[b"fine_label_names" if count == 100 else b"label_names"]]


class _Recorded:
    """Object of a pickle: what it would be made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Recorder(pickle.Unpickler):
    """Unpickler that builds only pickle's built-in types, and records other objects. It runs no code of the pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a new class in place of a class or function, so that changes of it by the pickle have no effect."""
        if (module, name) == ("_codecs", "encode"):  # bytes, as Python 3 writes them in old formats
            return lambda text, _: text.encode("latin1")
        return type("Recorded", (_Recorded,), {})
