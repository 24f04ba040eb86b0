"""Index of a checkpoint: places of the parts of each tensor; size and checksum of every file."""

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from vitpar.errors import CheckpointError, DataError
from vitpar.io import open_regular, read_json, stat_regular
from vitpar.records import Count, Record, first_wrong
from vitpar.text import literal, shown

INDEX = "index.json"
STATE, RECIPE, PLAN, CONFIG = "state.json", "recipe.toml", "plan.json", "config.json"
"""Text files of a checkpoint: state of the run besides its tensors, recipe, plan, model configuration."""
CLASSES = "classes.json"
"""Text file of a checkpoint and of saved weights: names of the classes, where the data have names."""
PARAMETERS, MOMENTS, AVERAGES = "model.", "optimizer.", "ema."
"""Prefixes of tensor names: parameters, optimizer state, exponential moving averages."""
VERSION = 1
"""Version of the format that is written."""
_CHUNK = 1 << 24
"""Bytes that are read at a time."""
Shape = tuple[Count, ...]
Box = tuple[Count, Shape, Shape]
"""Part of a tensor: number of the shard file that stores it under the tensor's name, offsets, shape."""


class StoredTensor(Record):
    """Global tensor whose parts are stored in shard files."""

    dtype: Literal["float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool"]
    """Name of the dtype in torch."""
    shape: Shape
    """Shape of the global tensor."""
    parts: list[Box]
    """Boxes that fill the tensor without overlapping."""

    def is_filled(self, shards: int) -> bool:
        """Return whether the boxes have as many elements as the tensor, and each is in one of `shards` files."""
        fits = all(shard < shards and len(at) == len(sizes) == len(self.shape) for shard, at, sizes in self.parts)
        return fits and sum(math.prod(sizes) for _, _, sizes in self.parts) == math.prod(self.shape)


class StoredFile(Record):
    """Size and checksum of a file when it was written."""

    bytes: Count
    """Size of the file."""
    crc32: Count
    """CRC-32 of its content."""


class Index(Record):
    """Contents of a checkpoint."""

    version: Literal[1] = 1
    """Version of this format."""
    shards: list[str]
    """Names of the files with tensors. Boxes refer to them by position."""
    tensors: dict[str, StoredTensor]
    """All tensors by name."""
    files: dict[str, StoredFile]
    """All files by name, with tensors or text, except the index itself."""
    crc32: Count = 0
    """CRC-32 of all other fields."""

    @property
    def checksum(self) -> int:
        """CRC-32 of all fields except `crc32`."""
        # Without defaults, so that fields added later do not change the checksum of old checkpoints.
        return zlib.crc32(self.model_dump_json(exclude={"crc32"}, exclude_defaults=True).encode())


def read_index(folder: Path) -> Index:
    """Read the index of `folder`. Raises CheckpointError if it is missing, damaged or names files outside."""
    try:
        content = read_json(folder / INDEX)
        version = content.get("version", VERSION) if isinstance(content, dict) else VERSION
        if isinstance(version, int) and version > VERSION:
            raise CheckpointError(f"'{folder}' has format {version}, which is newer than {VERSION}: update vitpar")
        index = Index.model_validate(content)
    except FileNotFoundError:
        raise CheckpointError(
            f"'{folder}' is not a checkpoint ({INDEX} is missing): name a folder that has it"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{INDEX} of '{folder}' cannot be read: {first_line(error)}: use another checkpoint"
        ) from None
    if index.crc32 != index.checksum:
        raise CheckpointError(f"{INDEX} of '{folder}' has a wrong checksum: use another checkpoint")
    for name in {*index.files, *index.shards}:
        if not is_file_name(name) or name not in index.files:
            raise CheckpointError(
                f"{INDEX} of '{folder}' lists {literal(name)}, which is not one of its files: do not use it"
            )
    for name, tensor in index.tensors.items():
        if not tensor.is_filled(len(index.shards)):
            raise CheckpointError(f"{INDEX} of '{folder}' has parts that do not fill {shown(name)}: do not use it")
    return index


def is_file_name(said: object) -> bool:
    """Return whether an untrusted value is the name of a file directly in a folder."""
    return isinstance(said, str) and Path(said).name == said and said not in ("", "..") and "\0" not in said


def damage(folder: Path, files: Mapping[str, StoredFile], *, only_sizes: bool = False) -> str | None:
    """Return the first problem of `files` in `folder`; None if all are as they were written.

    only_sizes: compare only the sizes, without reading the files.
    """
    for name, known in files.items():
        try:
            size = stat_regular(folder / name).st_size
            if size != known.bytes:
                return f"{shown(name)} has {size:,} bytes instead of {known.bytes:,}"
            if not only_sizes and crc32(folder / name) != known.crc32:
                return f"{shown(name)} has a wrong checksum"
        except OSError as error:
            return f"{shown(name)}: {error.strerror}"
    return None


def crc32(path: Path) -> int:
    """Return the CRC-32 of a file. Raises OSError."""
    crc = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, cut to a length that can be quoted."""
    if isinstance(error, ValidationError):
        return first_wrong(error)
    return shown((getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0])


def read_class_names(folder: Path, classes: int | None = None) -> tuple[str, ...] | None:
    """Return the names of the classes of saved weights or of a checkpoint; None if it has none.

    classes: number of classes of the model; None for any.

    Raises DataError for a file that is not a list of that many names.
    """
    path = folder / CLASSES
    if not path.exists():
        return None
    try:
        names = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {first_line(error)}") from None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"'{path}' is not a list of names: remove it to use numbers")
    if classes is not None and len(names) != classes:
        raise DataError(
            f"'{path}' has {len(names):,} names but the model has {classes:,} classes: remove it to use numbers"
        )
    return tuple(names)
