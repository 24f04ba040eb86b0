"""Files that strangers made, read without running what they hold.

Safetensors, or what `torch.save` wrote, which is a pickle (``vitpar.weights.pickles``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitpar.checkpoint.index import INDEX as CHECKPOINT_INDEX
from vitpar.errors import DataError, literal, shown
from vitpar.limits import MAX_TENSOR_DIMS
from vitpar.weights.pickles import unpickled
from vitpar.weights.shards import Shards, read_object, read_weight_map

_SAFETENSORS = "model.safetensors"
_PICKLES = ("pytorch_model.bin",)
_CONFIGS = ("config.json", "preprocessor_config.json")
_INSIDE = ("state_dict_ema", "model_ema", "state_dict", "model")
"""Under which names files keep parameters beside other things, those first that evaluate best."""
_AROUND = ("module.", "_orig_mod.")
"""What wrappers (data parallelism, the compiler) put before all names."""


@dataclass(frozen=True)
class Source:
    """Named tensors of somebody else. place: for messages. shapes: by name. configs: of the JSON files beside them,
    by name. notes: what the user should know of how they were read."""

    place: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def open_source(path: Path, trust: bool = False) -> Source:
    """What is in a file, or in a folder with a model and its config.json. Raises DataError.

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


def _from_shards(place: Path, shards: Shards, configs: dict[str, dict[str, Any]]) -> Source:
    around = _around(shards.shapes)
    shapes = {name.removeprefix(around): shape for name, shape in shards.shapes.items()}
    return Source(place, shapes, lambda name: shards.read(around + name), configs)


def _from_pickles(place: Path, files: list[Path], trust: bool, configs: dict[str, dict[str, Any]]) -> Source:
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
    return Source(place, shapes, lambda name: tensors[name].detach(), configs, tuple(notes))


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
    """What stands before all of `names` and is no part of them."""
    around = ""
    while part := next((p for p in _AROUND if names and all(name.startswith(around + p) for name in names)), ""):
        around += part
    return around
