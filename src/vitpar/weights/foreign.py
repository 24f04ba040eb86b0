"""Weights of other libraries from untrusted sources: files that are read without running code, and names of tensors.

These are safetensors files, or files of `torch.save`. The latter are pickles, which can run any code when they are
loaded. They are loaded as pickles only with `trust`, and otherwise by torch's restricted unpickler, which makes only
tensors and plain containers (``weights_only``).

In checkpoints of training code a model's tensors stand behind a prefix, next to a decoder, or among counters. DINO and
DINOv2 write `teacher` and `student` with names after `backbone.`, Lightning a `state_dict` with names after `model.`,
MAE its decoder, torch's AveragedModel a counter.
"""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitpar.checkpoint.index import INDEX as CHECKPOINT_INDEX
from vitpar.errors import DataError
from vitpar.io import open_regular
from vitpar.models.bert.names import BertWeights
from vitpar.models.convert import Conversion
from vitpar.models.mae.names import MAEWeights
from vitpar.models.rows import Found, Shapes
from vitpar.models.swin.names import SwinWeights
from vitpar.models.t5.names import T5Weights
from vitpar.models.vit.names import ViTWeights
from vitpar.text import either, literal, shown
from vitpar.weights.shards import TABLES, Shards, listed, read_object, read_weight_map

_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"
_CONFIGS = ("config.json", "preprocessor_config.json")
_INSIDE = ("state_dict_ema", "model_ema", "teacher", "state_dict", "model", "student")
"""Keys under which files keep the parameters next to other content; those that evaluate best come first."""
_AROUND = ("module.", "_orig_mod.")
"""Prefixes of all names in files of wrapped modules (data parallelism, torch.compile)."""


@dataclass(frozen=True)
class ForeignWeights:
    """Named tensors from an untrusted source."""

    place: Path
    """File or folder, for messages."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the tensors by name."""
    read: Callable[[str], Tensor]
    """Function from a name to the tensor."""
    configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Content of the JSON files next to the tensors, by file name."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on how the tensors were read."""


def open_source(path: Path, trust: bool = False) -> ForeignWeights:
    """Open a weights file, or a folder with a model and its config.json.

    trust: whether to read a file that could run code.

    Raises DataError.
    """
    configs: dict[str, dict[str, Any]] = {}
    if path.is_dir():
        if (path / CHECKPOINT_INDEX).exists():
            raise DataError(f"'{path}' is a checkpoint of a run: use `vitpar checkpoint export` instead")
        configs = {name: read_object(path / name) for name in _CONFIGS if (path / name).exists()}
        folder, names = path, [f"{name}{end}" for name in (_SAFETENSORS, _PICKLE) for end in (".index.json", "")]
        if (first := next((name for name in names if (path / name).exists()), None)) is None:
            raise DataError(
                f"'{path}' has no weights under a known name ({_SAFETENSORS}, {_PICKLE}): name the file itself"
            )
    elif path.is_file():
        folder, first = path.parent, path.name
    else:
        raise DataError(f"no weights at '{path}': name a downloaded or saved file or folder")
    places = read_weight_map(folder, first) if path.is_dir() and first.endswith(".index.json") else {}
    files = list(dict.fromkeys(places.values())) or [first]
    if not (first.removesuffix(".index.json") if places else first).endswith(".safetensors"):
        return _from_pickles(path, [folder / file for file in files], places, trust, configs)
    shards = Shards(folder, files, places or None)
    around = _around(shards.shapes)
    shapes = {name.removeprefix(around): shape for name, shape in shards.shapes.items()}
    return ForeignWeights(path, shapes, lambda name: shards.read(around + name), configs)


def _from_pickles(
    place: Path, files: list[Path], places: Mapping[str, str], trust: bool, configs: dict[str, dict[str, Any]]
) -> ForeignWeights:
    """Read files of torch.save. places: file of each tensor, by an index; empty without one."""
    tensors: dict[str, Tensor] = {}
    notes: list[str] = []
    for file in files:
        content = _unpickled(file, trust)
        while isinstance(content, dict) and (keys := [key for key in _INSIDE if isinstance(content.get(key), dict)]):
            if len(keys) > 1:
                notes.append(f"'{file}' has {' and '.join(keys)}: the first is used")
            content = content[keys[0]]
        if not isinstance(content, dict) or not any(isinstance(value, Tensor) for value in content.values()):
            raise DataError(f"'{file}' has no named tensors: use a file with a state_dict")
        if lacking := [name for name, where in places.items() if where == file.name and name not in content]:
            raise DataError(f"'{file}' lacks {listed(lacking)}, which its index lists")
        for name, tensor in content.items():
            integers = isinstance(tensor, Tensor) and tensor.dtype in (torch.int64, torch.int32)
            # Single integers are what AveragedModel and batch norms count in.
            counter = integers and (tensor.numel() == 1 or str(name).endswith(TABLES))
            if counter or places.get(name, file.name) != file.name:
                continue
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                said = literal(name) if isinstance(name, str) else type(name).__name__
                raise DataError(f"'{file}' has {said} among its tensors: use a plain state_dict")
            if tensor.layout != torch.strided or not tensor.is_floating_point() or tensor.device.type != "cpu":
                raise DataError(
                    f"{shown(name)} in '{file}' is {tensor.dtype} ({tensor.layout}) and cannot be a parameter"
                )
            tensors[name] = tensor
    around = _around(tensors)
    tensors = {name.removeprefix(around): tensor for name, tensor in tensors.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return ForeignWeights(place, shapes, lambda name: tensors[name].detach(), configs, tuple(notes))


def _around(names: Mapping[str, Any]) -> str:
    """Return the wrapper prefixes that all of `names` begin with; empty if there are none."""
    around = ""
    while part := next((p for p in _AROUND if names and all(name.startswith(around + p) for name in names)), ""):
        around += part
    return around


def _unpickled(file: Path, trust: bool) -> Any:
    """Load the object that `torch.save` wrote to `file`.

    trust: whether to load it as a plain pickle, which may run code.

    Raises DataError.
    """
    try:
        with open_regular(file) as opened:
            begin = opened.read(4)
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror}") from None
    if begin != b"PK\x03\x04" and begin[:1] != b"\x80":  # how torch's two formats begin
        raise DataError(f"'{file}' is not a weights file: name one that ends in .safetensors, .pth, .pt or .bin")
    try:
        # Files of DeiT and MAE also contain their command line as an argparse.Namespace, which only has attributes.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the pickle protocol
            return torch.load(file, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a malicious file can cause any error
        said = " ".join(str(error).split())
        if isinstance(error, pickle.UnpicklingError) and not trust:
            name = re.search(r"GLOBAL:? (\S+)", said)
            raise DataError(
                f"'{file}' contains more than tensors{f' ({shown(name[1])})' if name else ''} and could run code when "
                "loaded: use safetensors, or pass --trust if you trust its author"
            ) from None
        # torch's own sentence advises to load the file without any restriction.
        reason = type(error).__name__ if "weights_only" in said or not said else shown(said)
        raise DataError(f"'{file}' cannot be read: {reason}") from None


FAMILIES: dict[str, Conversion] = {
    one.family.FAMILY: one() for one in (BertWeights, T5Weights, SwinWeights, MAEWeights, ViTWeights)
}
"""Conversions by family. The patch projection, by which ViT's formats are recognised, is in other families too."""
OWN = ("embed.patch_embed.proj.weight", "embed.word_embeddings.weight")
"""Names that identify weights of vitpar."""
_COUNTERS = re.compile(r"(?:.*\.)?(?:n_averaged|total_ops|total_params|num_batches_tracked)")
"""Names of tensors that training code adds: the counters of AveragedModel, of profilers and of batch norms."""
_BETTER = ("teacher", "ema")
"""Words in the prefixes of entries that evaluate best."""


def recognised(place: object, shapes: Shapes, *, classifies: bool = False) -> tuple[Conversion, Found]:
    """Return (conversion of the family, tensors whose names are known).

    place: origin of the tensors, for messages.
    classifies: whether a classifier is wanted. A masked autoencoder then counts as the Vision Transformer that is its
        encoder.

    Raises DataError for an unknown format, and for names that a model of the format does not have.
    """
    for family in FAMILIES.values():
        found = None if isinstance(family, MAEWeights) and classifies else family.renamed(shapes)
        if found is None:
            continue
        if found.unknown:
            raise DataError(
                f"'{place}' has {listed(list(found.unknown))}, which vitpar's model lacks: use another model"
            )
        return family, found
    raise DataError(
        f"the tensor names in '{place}' are not those of timm's, transformers' or vitpar's models: it has "
        f"{listed(sorted(shapes))}"
    )


def is_model(shapes: Shapes) -> bool:
    """Return whether the names are those of a model."""
    return any(name in shapes for name in OWN) or any(family.renamed(shapes) for family in FAMILIES.values())


def unwrapped(source: ForeignWeights, prefix: str | None = None) -> ForeignWeights:
    """Return the tensors of the model in `source` under the names of its library, with notes on what is left out.

    prefix: beginning of the names of the model's tensors, which is removed; None to find it.

    Raises DataError for a prefix that no name has, and for several models among the tensors.
    """
    shapes = {name: shape for name, shape in source.shapes.items() if not _COUNTERS.fullmatch(name)}
    if prefix is None:
        prefixes = [] if is_model(shapes) else list(dict.fromkeys(_prefixes(shapes)))
        best = [one for one in prefixes if any(word in one for word in _BETTER)]
        prefixes = best or prefixes
        if len(prefixes) > 1:
            raise DataError(
                f"'{source.place}' has several models, with names after "
                f"{either(repr(shown(one)) for one in prefixes)}: choose one with --prefix"
            )
        prefix = prefixes[0] if prefixes else ""
    inside = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
    if not inside:
        raise DataError(
            f"no tensor of '{source.place}' has a name that begins with '{shown(prefix)}': correct --prefix"
        )
    notes = [f"names are read after '{shown(prefix)}'"] * bool(prefix)
    if outside := [name for name in shapes if not name.startswith(prefix)]:
        notes.append(f"{listed(outside)} left out, since their names do not begin with '{shown(prefix)}'")
    start = prefix
    return replace(source, shapes=inside, read=lambda name: source.read(start + name), notes=(*source.notes, *notes))


def _prefixes(shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the shortest prefix of every name of a patch projection behind which there is a model."""
    for name in shapes:
        parts = name.split(".")
        # A model's patch projection has at least two dots in its name: patch_embed.proj.weight.
        for length in range(1, len(parts) - 2) if "patch_embed" in name and name.endswith(".weight") else ():
            prefix = ".".join(parts[:length]) + "."
            if is_model({key.removeprefix(prefix): shapes[key] for key in shapes if key.startswith(prefix)}):
                yield prefix
                break
