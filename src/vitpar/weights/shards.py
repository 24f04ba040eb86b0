"""Safetensors files as a mapping from names to tensors, and the index of which file holds which tensor.

Reading never runs code from a file and never allocates memory only because a file claims a size. safetensors refuses
tensors whose sizes do not match the bytes of the file exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from vitpar.checkpoint.image import open_safetensors
from vitpar.checkpoint.index import first_line, is_file_name
from vitpar.errors import DataError
from vitpar.io import read_json
from vitpar.text import literal, shown

_FLOATS = ("F64", "F32", "BF16", "F16")
TABLES = ("position_ids", "relative_position_index")
"""Ends of the names of tables of integers in older files, which a model computes itself."""
FEW = 3
"""Number of names that an error message lists; the others are only counted."""


class Shards:
    """Tensors of several safetensors files. shapes: shapes of the tensors by name, without `TABLES`."""

    def __init__(self, folder: Path, files: Iterable[str], weight_map: Mapping[str, str] | None = None) -> None:
        """Open the files and read their headers.

        files: file names in `folder`.
        weight_map: file of each tensor to use; None for all tensors in the files.

        Raises DataError for files that cannot be read, lack a tensor of `weight_map`, or hold tensors that are no
        floating-point numbers.
        """
        self._folder = folder
        self._held: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            for file in files:
                opened = open_safetensors(folder / file)
                for name in opened.keys():  # noqa: SIM118, it is no dict
                    if weight_map is not None and weight_map.get(name) != file:
                        continue
                    if name in self._held:
                        raise DataError(f"'{folder}' has {shown(name)} in two files: remove one of them")
                    self._held[name] = opened
                    if name.endswith(TABLES):
                        continue
                    stored = opened.get_slice(name)
                    if not name or (dtype := stored.get_dtype()) not in _FLOATS:
                        wrong = f"dtype {dtype}" if name else "no name"
                        raise DataError(f"{shown(name)} in '{folder / file}' cannot be a parameter: it has {wrong}")
                    self.shapes[name] = tuple(stored.get_shape())
        except (OSError, SafetensorError) as error:
            raise DataError(f"'{folder / file}' cannot be read: {first_line(error)}") from None
        for name, file in (weight_map or {}).items():
            if name not in self._held:
                raise DataError(f"'{folder / file}' lacks {shown(name)}, which its index lists")

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`. Raises DataError."""
        try:
            return self._held[name].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DataError(f"{shown(name)} in '{self._folder}' cannot be read: {first_line(error)}") from None


def read_weight_map(folder: Path, index: str) -> dict[str, str]:
    """Return the file of each tensor, as the file `index` in `folder` lists them.

    A file may be a symbolic link, as all files in Hugging Face's cache are.

    Raises DataError, also for names of files outside the folder.
    """
    weight_map = read_object(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError(f"'{folder / index}' cannot be read: it has no weight_map")
    for file in weight_map.values():
        if not is_file_name(file) or len(file) > 255:
            raise DataError(
                f"'{folder / index}' lists {literal(file)}, which is not a file in its folder: do not use it"
            )
    return weight_map


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises DataError for anything else."""
    try:
        value = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise DataError(f"'{path}' cannot be read: it is not a JSON object")
    return value


def refuse_other_shapes(
    place: Path, given: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]], *, exactly: bool
) -> None:
    """Raise DataError if tensors do not have the names and shapes of a model's parameters.

    place: origin of the tensors, for the message.
    given: shapes of the tensors.
    needed: shapes of the parameters.
    exactly: whether to refuse tensors beyond the needed ones too.
    """
    wrong = [
        f"{shown(name)} has shape {list(given[name])} but the model has {list(shape)}"
        for name, shape in needed.items()
        if name in given and given[name] != shape
    ]
    missing = [name for name in needed if name not in given]
    further = [name for name in given if name not in needed] if exactly else []
    said = [
        *([f"it lacks {listed(missing)}"] if missing else []),
        *([f"the model has no {listed(further)}"] if further else []),
        *([listed(wrong)] if wrong else []),
    ]
    if said:
        raise DataError(
            f"'{place}' does not match the model: {'; '.join(said)}: use the weights and config.json of one model"
        )


def listed(names: list[str]) -> str:
    """Return the first FEW names, and the number of further ones, for a message."""
    more = len(names) - FEW
    return ", ".join(map(shown, names[:FEW])) + (f" and {more:,} more" if more > 0 else "")
