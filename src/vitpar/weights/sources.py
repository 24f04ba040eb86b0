"""Files that strangers made, read without running what they hold.

Safetensors, or what `torch.save` wrote. That is a pickle, which can run anything when it is read; only with `trust` is
it read as one, else by torch's reader that makes tensors and plain containers alone (``weights_only``).
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from vitpar.checkpoint.index import INDEX as CHECKPOINT_INDEX
from vitpar.errors import DataError
from vitpar.io import open_regular
from vitpar.limits import MAX_PICKLED_WORD_CHARS, MAX_TENSOR_DIMS, MAX_ZIP_LISTING_BYTES
from vitpar.text import literal, shown
from vitpar.weights.shards import Shards, read_object, read_weight_map

_SAFETENSORS = "model.safetensors"
_PICKLES = ("pytorch_model.bin",)
_CONFIGS = ("config.json", "preprocessor_config.json")
_INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Under which names files keep parameters beside other things, those first that evaluate best."""
_AROUND = ("module.", "_orig_mod.")
"""Prefixes that wrappers (data parallelism, the compiler) put before all names."""
_LEGACY_PICKLES = 5
"""In a file that is no zip file: its format's number twice, the machine, the object, and the names of its storages."""

_DAMAGED = (OSError, EOFError, ValueError, ArithmeticError, LookupError, NotImplementedError, zipfile.BadZipFile)
"""Errors of zipfile and pickletools for a file that is no zip file or no pickle, or is damaged."""
_SMALL = 1 << 16  # bytes that are read without a check of the size


@dataclass(frozen=True)
class ForeignWeights:
    """Named tensors of somebody else. place: for messages. shapes: by name. configs: of the JSON files beside them,
    by name. notes: what the user should know of how they were read."""

    place: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def open_source(path: Path, trust: bool = False) -> ForeignWeights:
    """Open a file, or a folder with a model and its config.json. Raises DataError.

    trust: whether a file that could run code is read all the same.
    """
    if not path.is_dir():
        if not path.is_file():
            raise DataError(f"there are no weights at '{path}': name a file or folder that was downloaded or saved")
        if path.suffix == ".safetensors":
            return _from_shards(path, Shards(path.parent, [path.name]), {})
        return _from_pickles(path, [path], trust, {})
    if (path / CHECKPOINT_INDEX).exists():
        raise DataError(f"'{path}' is a checkpoint of a run: use `vitpar checkpoint export` instead")
    configs = {name: read_object(path / name) for name in _CONFIGS if (path / name).exists()}
    if (path / f"{_SAFETENSORS}.index.json").exists():
        return _from_shards(path, Shards.indexed(path, f"{_SAFETENSORS}.index.json"), configs)
    if (path / _SAFETENSORS).exists():
        return _from_shards(path, Shards(path, [_SAFETENSORS]), configs)
    for name in _PICKLES:
        if (path / f"{name}.index.json").exists():
            files = dict.fromkeys(read_weight_map(path, f"{name}.index.json").values())
            return _from_pickles(path, [path / file for file in files], trust, configs)
        if (path / name).exists():
            return _from_pickles(path, [path / name], trust, configs)
    known = ", ".join((_SAFETENSORS, *_PICKLES))
    raise DataError(f"'{path}' holds no weights under a name that is known ({known}): name the file itself")


def _from_shards(place: Path, shards: Shards, configs: dict[str, dict[str, Any]]) -> ForeignWeights:
    around = _around(shards.shapes)
    shapes = {name.removeprefix(around): shape for name, shape in shards.shapes.items()}
    return ForeignWeights(place, shapes, lambda name: shards.read(around + name), configs)


def _from_pickles(place: Path, files: list[Path], trust: bool, configs: dict[str, dict[str, Any]]) -> ForeignWeights:
    tensors: dict[str, Tensor] = {}
    notes: list[str] = []
    for file in files:
        found = unpickled(file, trust)
        while isinstance(found, dict) and (keys := [key for key in _INSIDE if isinstance(found.get(key), dict)]):
            if len(keys) > 1:
                notes.append(f"of {' and '.join(keys)} in '{file}' the first is taken")
            found = found[keys[0]]
        if not isinstance(found, dict) or not any(isinstance(value, Tensor) for value in found.values()):
            raise DataError(f"'{file}' holds no tensors by name: give one that has a state_dict")
        _refuse_unusual(file, found)
        tensors |= found
    around = _around(tensors)
    tensors = {name.removeprefix(around): tensor for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return ForeignWeights(place, shapes, lambda name: tensors[name].detach(), configs, tuple(notes))


def _refuse_unusual(file: Path, tensors: dict[Any, Any]) -> None:
    """Refuse all but plain tensors of numbers by name, not larger than their file. Raises DataError."""
    size, claimed = file.stat().st_size, 0
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            said = literal(name) if isinstance(name, str) else type(name).__name__
            raise DataError(f"'{file}' has {said} among its tensors, which is none: give a plain state_dict")
        if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_floating_point():
            raise DataError(f"{shown(name)} in '{file}' is {tensor.dtype} ({tensor.layout}), which is no parameter")
        if tensor.ndim > MAX_TENSOR_DIMS:
            raise DataError(f"{shown(name)} in '{file}' is of {tensor.ndim} dimensions, which is no parameter")
        claimed += tensor.numel() * tensor.element_size()
        if tensor.device.type != "cpu" or claimed > size:
            raise DataError(f"the tensors in '{file}' up to {shown(name)} are larger than the file: do not use it")


def _around(names: Mapping[str, Any]) -> str:
    """Return the prefix of wrappers that all of `names` begin with."""
    around = ""
    while part := next((p for p in _AROUND if names and all(name.startswith(around + p) for name in names)), ""):
        around += part
    return around


def unpickled(file: Path, trust: bool) -> Any:
    """Return what `torch.save` put into `file`. trust: read it as a pickle, which may run code. Raises DataError."""
    try:
        with open_regular(file) as opened:
            zipped = opened.read(4) == b"PK\x03\x04"  # how torch tells its two formats apart
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror}") from None
    if zipped:
        _refuse_bombs(file)
    if not trust:
        _refuse_long_words(file, zipped)
    try:
        # DeiT's and MAE's files keep their command line beside the parameters, which is attributes and nothing more.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's protocol
            # Mapped, a tensor cannot claim more memory than the file has.
            if zipped:
                return torch.load(file, map_location="cpu", weights_only=not trust, mmap=True)
            with _Bounded(file) as bounded:
                return torch.load(bounded, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a hostile file can make the reader stumble in any way
        said = " ".join(str(error).split())
        other = re.search(r"GLOBAL:? (\S+)|operand (\d+)", said)
        if isinstance(error, pickle.UnpicklingError) and not trust and other:
            what = shown(other[1] or f"the instruction {other[2]}")
            raise DataError(
                f"'{file}' holds more than tensors ({what}), which could run code when it is read: ask for "
                "safetensors, or say --trust if you trust whoever made it"
            ) from None
        sentence = shown(said.partition("Trying to load")[0])
        raise DataError(f"'{file}' cannot be read: {sentence or type(error).__name__}") from None


class _Listed(io.FileIO):
    """A zip file of which only the listing is read, and no long one: each of its entries becomes a large object."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_ZIP_LISTING_BYTES:
            raise OSError(f"its listing has more than {MAX_ZIP_LISTING_BYTES:,} bytes")
        return super().read(size) or b""


class _Bounded(io.BufferedReader):
    """Reader that allocates memory only for content the file has, however much is requested."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and 0 <= size <= _SMALL:
            return super().read(size)
        left = max(0, self._size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _refuse_bombs(file: Path) -> None:
    """torch.save compresses nothing, so a file is at least as large as what is in it."""
    try:
        with _Listed(file) as opened, zipfile.ZipFile(opened) as archive:
            inside = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"'{file}' cannot be read: {shown(error)}") from None
    size = file.stat().st_size
    unpacked = sum(entry.file_size for entry in inside)
    if unpacked > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in inside):
        raise DataError(
            f"'{file}' has {size:,} bytes and unpacks to {unpacked:,}, which no file of torch.save does: do not use it"
        )


def _refuse_long_words(file: Path, zipped: bool) -> None:
    """Refuse what torch would need very long to refuse: to explain an error, it searches its text for patterns that
    take the square of the length of a word."""
    try:
        for content in _pickles(file, zipped):
            for _, value, _ in pickletools.genops(content):
                if isinstance(value, str | bytes) and len(value) > MAX_PICKLED_WORD_CHARS:
                    longest = max(map(len, value.split()), default=0)
                    if longest > MAX_PICKLED_WORD_CHARS:
                        raise DataError(f"'{file}' has a word of {longest:,} characters: ask for safetensors")
    except _DAMAGED as error:
        raise DataError(f"'{file}' cannot be read: {shown(error) or 'it is cut off'}") from None


def _pickles(file: Path, zipped: bool) -> Iterator[IO[bytes]]:
    """Yield files that stand where a pickle begins."""
    if not zipped:
        with _Bounded(file) as content:
            for _ in range(_LEGACY_PICKLES):
                if content.peek(1):
                    yield content
        return
    with _Listed(file) as opened, zipfile.ZipFile(opened) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("data.pkl"):
                entry.CRC = None  # type: ignore[assignment]  # torch.save may leave it out
                yield io.BytesIO(archive.read(entry))
