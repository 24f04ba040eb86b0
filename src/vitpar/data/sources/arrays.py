"""Sources that are arrays of pixels, which are stored as PNG: CIFAR and scikit-learn's digits.

CIFAR-10 and CIFAR-100 (Krizhevsky 2009) are read as published, from the archive or the folder it unpacks to, in the
binary or the Python version. The Python version consists of pickles, which could run code, so only arrays of integers
and plain values are read from them. The digits are 1,797 handwritten digits of 8×8 pixels.
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
from vitpar.data.sources.source import Source, SourceSplit, read_file, reading
from vitpar.data.tar import unpacked
from vitpar.errors import DataError
from vitpar.io import decode_utf8
from vitpar.text import shown

DIGITS = "digits"
"""Name of the source of scikit-learn's digits."""
DIGITS_PACKAGE, INSTALL_DIGITS = "sklearn", "pip install -e '.[digits]'"
"""Module that has the digits, and the command that installs it."""
_PIXELS = 3 * 32 * 32  # bytes of an image of CIFAR
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_WHOLE = (
    {"test_batch", *_BATCHES},
    {"test_batch.bin"},
    {"train", "test", "meta"},
    {"train.bin", "test.bin"},
)
"""Sets of files, each of which identifies CIFAR: of 10 or 100 classes, in the Python or the binary version."""
_NAMED = set().union(*_WHOLE, (f"{name}.bin" for name in _BATCHES))
_NAMED |= {"batches.meta", "batches.meta.txt", "fine_label_names.txt"}
Files = dict[str, Callable[[], bytes]]
"""Functions that return the contents of files, by file name."""


def digits() -> Source:
    """Return the digits of scikit-learn, without a `val` split.

    Raises DataError if scikit-learn is not installed.
    """
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
    """Return the source that consists of `files`. CIFAR's test split becomes `val`.

    Raises DataError.
    """
    fine = "train" in files or "train.bin" in files
    train, test = (("train",), ("test",)) if fine else (_BATCHES, ("test_batch",))
    binary = f"{test[0]}.bin" in files
    read = _binary if binary else _pickled
    parts = {
        split: [read(files, f"{name}.bin" if binary else name, fine) for name in names]
        for split, names in (("train", train), ("val", test))
    }
    splits = {}
    for split, batches in parts.items():
        pixels, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        splits[split] = _split(split, pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)
    classes = _classes(files, fine, binary)
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

    return SourceSplit([f"{name}/{i}" for i in range(len(labels))], labels.astype(np.int32), read)


def _classes(files: Files, fine: bool, binary: bool) -> list[str]:
    name = ("fine_label_names.txt" if fine else "batches.meta.txt") if binary else ("meta" if fine else "batches.meta")
    if name not in files:
        return [str(label) for label in range(100 if fine else 10)]
    if binary:
        with reading(name):
            return class_names(files[name]())
    names = _loaded(files, name)
    try:
        with reading(name):
            return [decode_utf8(word) for word in names[b"fine_label_names" if fine else b"label_names"]]
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"CIFAR file '{name}' has no class names: fetch it again") from None


def _binary(files: Files, name: str, fine: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and labels of a binary file.

    Each record of it has a label, or with `fine` a coarse and a fine label, and then the pixels.
    """
    data, labels = np.frombuffer(_data(files, name), np.uint8), 2 if fine else 1
    if not len(data) or len(data) % (labels + _PIXELS):
        raise DataError(f"CIFAR file '{name}' has {len(data)} bytes, not a multiple of the image size: fetch it again")
    records = data.reshape(-1, labels + _PIXELS)
    return records[:, labels:], records[:, labels - 1]


def _pickled(files: Files, name: str, fine: bool) -> tuple[np.ndarray, np.ndarray]:
    batch = _loaded(files, name)
    try:
        pixels, numbers = batch[b"data"].value, batch[b"fine_labels" if fine else b"labels"]
        if pixels.dtype != np.uint8 or pixels.shape != (len(numbers), _PIXELS):
            raise ValueError
        if type(numbers) is not list or not all(type(number) is int for number in numbers):
            raise ValueError
        labels = np.array(numbers, np.int64)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise DataError(f"CIFAR file '{name}' lacks images or labels: fetch it again") from None
    return pixels, labels


def _data(files: Files, name: str) -> bytes:
    if name not in files:
        raise DataError(f"CIFAR file '{name}' is missing: fetch it again")
    return files[name]()


def _loaded(files: Files, name: str) -> Any:
    data = _data(files, name)
    try:
        return _Plain(io.BytesIO(data), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # damaged pickles raise nearly anything
        raise DataError(
            f"CIFAR file '{name}' cannot be read ({shown(error) or type(error).__name__}): fetch it again"
        ) from None


class _Plain(pickle.Unpickler):
    """Unpickler that builds only arrays of integers and pickle's built-in types.

    `find_class` never returns a class or function of another module. It returns a new object every time, so a pickle
    that modifies the object has no lasting effect.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name that occurs in pickles of NumPy arrays.

        Raises DataError for any other name.
        """
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return lambda *_: _Array()
            case (("numpy.core.numeric" | "numpy._core.numeric"), "_frombuffer"):
                return lambda *args: _from_buffer(*args)
            case "numpy", "dtype":
                return lambda code, *_: _Dtype(code)
            case "numpy", "ndarray":
                return object()
            case "_codecs", "encode":
                return lambda text, encoding: text.encode("latin1")
        raise DataError(f"it asks for {shown(f'{module}.{name}')}, which CIFAR files do not need")


def _from_buffer(data: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array.__setstate__((shape, dtype, order == "F" or order == b"F", data))
    return array


class _Dtype:
    """Stand-in for a pickled `numpy.dtype` of integers.

    code: type code such as b"u1".
    """

    def __init__(self, code: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else str(code)
        self.order = "|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        # A state may also describe fields, a shape and metadata, from which NumPy could make a type with pointers.
        _, order, subtype, names, fields, *_ = state
        if (subtype, names, fields) != (None, None, None):
            raise ValueError("its dtype is not supported")
        self.order = order.decode() if isinstance(order, bytes) else str(order)

    @property
    def value(self) -> np.dtype:
        if self.code not in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8") or self.order not in "|<>=":
            raise ValueError(f"its dtype {shown(self.code)} is not supported")
        return np.dtype(self.order + self.code)


class _Array:
    """Stand-in for a pickled array of integers, which is in the read-only attribute `value` once its state is set."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        shape, dtype, fortran, data = state[-4:]
        if not isinstance(dtype, _Dtype) or not isinstance(data, bytes | bytearray):
            raise ValueError("it has an array that is not numeric")
        self.value = np.frombuffer(data, dtype.value).reshape(shape, order="F" if fortran else "C")
