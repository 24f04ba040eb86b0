"""Low-rank adapters as files of peft, `adapter_config.json` and `adapter_model.safetensors`, by any library's names.

peft names an adapter after the linear layer in the adapted model. Where vitpar stores several layers of another library
as one, such as queries, keys and values, A is the same for all of them and each has its rows of B.

Files are not trusted: no code is run, and names, types and shapes are compared before a tensor is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import save
from torch import Tensor

from vitpar.checkpoint.index import first_line
from vitpar.errors import DataError
from vitpar.limits import MAX_MEASURE, MAX_WIDTH
from vitpar.models.config import ModelConfig
from vitpar.models.description import MadeTensor
from vitpar.models.lora import A, B, LoRA
from vitpar.text import count, shown
from vitpar.weights.exporting import Format
from vitpar.weights.foreign import FAMILIES, ForeignWeights
from vitpar.weights.shards import Shards, listed, read_object

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""Names of peft's files."""
_PREFIX = "base_model.model."
"""Begin of the names of tensors in peft's file."""


_ATTENTION = (
    *((rf"attention\.attention\.{word}\b", f"attention.{word[0]}_proj") for word in ("query", "key", "value")),
    (r"attention\.output\.dense", "attention.o_proj"),
)
_MLP = (
    (r"encoder\.layer\.", "layers."),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"(?<=\d)\.output\.dense", ".mlp.fc2"),
)
_MODULES = {
    **dict.fromkeys(("vit", "deit"), (*_ATTENTION, *_MLP)),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), _ATTENTION),
    "dinov3_vit": ((r"^layer\.", "model.layer."),),
    "siglip_vision_model": ((r"^vision_model\.", ""),),
}
"""Patterns of names in transformers' files, and their replacements in the names of modules of transformers 5, by type
of model. It renames tensors when it loads them; peft names adapters after modules."""


class _Settings(BaseModel):
    """Settings in an adapter_config.json that decide what an adapter computes."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    peft_type: str
    r: int = Field(ge=1, le=MAX_WIDTH)
    lora_alpha: int | float = Field(gt=0, le=MAX_MEASURE)
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    lora_bias: bool = False
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None
    target_modules: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    bias: str = "none"

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


@dataclass(frozen=True)
class _Place:
    """Place of another library's parameter in vitpar's model."""

    name: str
    """Name of vitpar's parameter."""
    rows: Tensor
    """Rows of it, int64, in the order of the other library."""


def _place(tensor: MadeTensor, config: ModelConfig) -> _Place | None:
    """Return the place of a tensor that is made of rows of one of vitpar's parameters; None for another tensor."""
    if len(tensor.names) != 1 or len(shape := config.shape(tensor.names[0])) not in (1, 2):
        return None
    numbers = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    try:
        placed = tensor.make(numbers)
    except (ValueError, RuntimeError):  # not for matrices, such as the kernel of a convolution
        return None
    first = placed.flatten(1)[:, 0] if placed.dim() > 1 else placed
    rows = (first / math.prod(shape[1:])).long()
    same = placed.shape[1:] == numbers.shape[1:] and torch.equal(placed, numbers[rows])
    return _Place(tensor.names[0], rows) if same else None


def _places(config: ModelConfig, format_name: Format | None) -> dict[str, _Place]:
    """Return the places of a library's vectors and matrices by its modules' names; None stands for vitpar's own."""
    if format_name is None:
        return {name: place for name in config.shapes if (place := _place(MadeTensor((name,)), config))}
    made = FAMILIES[config.FAMILY].exported(config, format_name)
    places, patterns = dict[str, _Place](), _MODULES.get(str(made.config.get("model_type")), ())
    for theirs, tensor in made.tensors.items():
        if place := _place(tensor, config):
            for pattern, name in patterns:
                theirs = re.sub(pattern, name, theirs)
            places[theirs] = place
    return places


def adapter_files(
    config: LoRA, read: Callable[[str], Tensor], trained: Collection[str], format_name: Format | None = None
) -> dict[str, bytes | str]:
    """Return the contents of peft's files, by name.

    read: returns an unsharded parameter of the model with adapters.
    trained: names of the parameters besides adapters that were trained. They become ``modules_to_save``.
    format_name: library whose names are used; None for vitpar's.

    Raises DataError for a library that has no such model, and for parameters that peft cannot save.
    """
    if format_name is not None and config.FAMILY not in FAMILIES:
        raise DataError(f"{config.name} is a model of your own, which {format_name} does not have: use --format vitpar")
    places, tensors, targets, done = _places(config.whole, format_name), dict[str, Tensor](), list[str](), set[str]()
    for theirs, place in places.items():
        module, name = place.name.removesuffix(".weight"), theirs.removesuffix(".weight")
        if module in config.modules and module != place.name:
            tensors[f"{_PREFIX}{name}{A}.weight"] = read(f"{module}{A}.weight").clone()
            tensors[f"{_PREFIX}{name}{B}.weight"] = read(f"{module}{B}.weight")[place.rows].contiguous()
            targets.append(name)
            done.add(module)
    saved = {theirs.rpartition(".")[0] for theirs, place in places.items() if place.name in trained}
    for theirs, place in places.items():
        if theirs.rpartition(".")[0] in saved:
            if place.name not in trained:
                raise DataError(
                    f"{place.name} was frozen, but others of its module were trained: peft saves complete modules, so "
                    "export the merged weights instead"
                )
            tensors[f"{_PREFIX}{theirs}"] = read(place.name)[place.rows].contiguous()
            done.add(place.name)
    if missing := sorted(({*config.modules} | {*trained}) - done):
        raise DataError(
            f"{format_name or 'vitpar'}'s model has no modules for {listed(missing)}: use another --format, or export "
            "the merged weights"
        )
    settings = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "modules_to_save": sorted(saved) or None,
    }
    return {
        SETTINGS: json.dumps(settings, indent=1),
        TENSORS: save({name: tensor.float() for name, tensor in tensors.items()}, metadata={"format": "pt"}),
    }


class _Opened:
    """Files of peft in a folder. Raises DataError for anything but plain LoRA.

    adapters: names of the adapted linear layers.
    others: names of complete parameters.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self.settings = settings = _Settings.model_validate(read_object(folder / SETTINGS))
        except ValidationError as error:
            raise DataError(f"'{folder / SETTINGS}' cannot be read: {first_line(error)}") from None
        unusual = ["use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern"]
        what = next((name for name in unusual if getattr(settings, name)), None)
        if settings.peft_type != "LORA":
            what = f"peft_type {shown(settings.peft_type)}"
        if what:
            raise DataError(f"'{folder / SETTINGS}' has {what}, which vitpar does not support: merge it with peft")
        self.folder, self.shards = folder, Shards(folder, [TENSORS])
        if other := next((name for name in self.shards.shapes if not name.startswith(_PREFIX)), None):
            raise DataError(f"{shown(other)} in '{folder / TENSORS}' does not begin with {_PREFIX}: use a file of peft")
        names = [name.removeprefix(_PREFIX) for name in self.shards.shapes]
        adapters = dict.fromkeys(name.removesuffix(f"{A}.weight") for name in names if name.endswith(f"{A}.weight"))
        pairs = {f"{name}{end}.weight" for name in adapters for end in (A, B)}
        if not adapters or (lacking := sorted(pairs - {*names})):
            what = f"lacks {listed(lacking)}" if adapters else "has no adapters of linear layers"
            raise DataError(f"'{folder / TENSORS}' {what}: use a file of peft")
        self.adapters, self.others = tuple(adapters), tuple(name for name in names if name not in pairs)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor by its name without peft's prefix."""
        return self.shards.shapes[f"{_PREFIX}{name}"]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor by its name without peft's prefix, float32. Raises DataError for another shape."""
        if self.shape(name) != shape:
            raise DataError(
                f"{shown(name)} in '{self.folder}' has shape {list(self.shape(name))} but the model has "
                f"{list(shape)}: use adapters of the same model and classes"
            )
        tensor = self.shards.read(f"{_PREFIX}{name}").float()
        if not tensor.isfinite().all():
            raise DataError(f"{shown(name)} in '{self.folder}' has non-finite numbers: do not use it")
        return tensor

    def pair(self, name: str, takes: int, gives: int) -> tuple[Tensor, Tensor]:
        """Return A and B of a linear layer. Raises DataError for other shapes."""
        shapes = {A: (self.settings.r, takes), B: (gives, self.settings.r)}
        a, b = (self.tensor(f"{name}{end}.weight", shape) for end, shape in shapes.items())
        return a, b

    def refuse_lacking(self, base: Collection[str], spelled: Callable[[str], str] = lambda name: name) -> None:
        """Raise DataError if the files lack what their settings list.

        base: names of the parameters of the adapted model. peft lists modules that a model lacks, such as `score`.
        spelled: function from a name in the files to that in `base`.
        """

        def has(names: Collection[str], module: str) -> bool:
            return any(f".{module}." in f".{name}" for name in names)

        saved, targets = self.settings.modules_to_save or [], self.settings.target_modules
        modules = [*saved, *(targets if isinstance(targets, list) else [])]
        lacking = [module for module in modules if has(base, spelled(module)) and not has(self.shards.shapes, module)]
        lacking = lacking or ([] if self.others else saved)
        if self.settings.bias != "none":
            biases = {f"{name}.bias" for name in self.adapters}
            lacking += sorted(bias for bias in biases - {*self.others} if spelled(bias) in base)
        if lacking:
            raise DataError(
                f"'{self.folder / TENSORS}' lacks {listed(lacking)}, which {SETTINGS} lists: save the adapters again"
            )


def read_adapters(folder: Path, config: LoRA) -> dict[str, Tensor]:
    """Return parameters of a model with adapters from files of peft by vitpar's names, unsharded, in float32.

    The files may use the names of vitpar, timm or transformers. Adapters that they lack are not returned.

    Raises DataError for files of another model, rank or kind, and for adapters of separate queries, keys and values
    with different A.
    """
    opened = _Opened(folder)
    if opened.settings.r != config.rank:
        raise DataError(f"the adapters in '{folder}' have rank {opened.settings.r}: set lora.rank to it")
    places = _fitting(opened, config.whole)
    factor = opened.settings.scale / config.scale
    made: dict[str, Tensor] = {}
    for name in opened.adapters:
        place = places[f"{name}.weight"]
        module = place.name.removesuffix(".weight")
        if module not in config.modules:
            raise DataError(f"'{folder}' adapts {shown(name)}, which is {module} here: add it to lora.targets")
        gives, takes = config.whole.shape(place.name)
        a, b = opened.pair(name, takes, len(place.rows))
        if (before := made.setdefault(f"{module}{A}.weight", a)) is not a and not torch.equal(before, a):
            raise DataError(
                f"the adapters in '{folder}' have different A for parts of {module}, which is one linear layer here: "
                "merge them with `vitpar checkpoint import --adapters`"
            )
        made.setdefault(f"{module}{B}.weight", torch.zeros(gives, config.rank))[place.rows] = b * factor
    for name in opened.others:
        place = places[name]
        shape = config.whole.shape(place.name)
        whole = made.setdefault(place.name, torch.full(shape, torch.nan))
        whole[place.rows] = opened.tensor(name, (len(place.rows), *shape[1:]))
    if partial := next((name for name, tensor in made.items() if tensor.isnan().any()), None):
        raise DataError(f"'{folder}' has only a part of {partial}, which is one parameter here: leave it out")
    return made


def _fitting(opened: _Opened, config: ModelConfig) -> dict[str, _Place]:
    """Return the places of the tensors in the files by the names there, of vitpar or of any version of a library.

    Raises DataError for tensors that the model lacks, and for files that lack what their settings list.
    """
    wanted = [*(f"{name}.weight" for name in opened.adapters), *opened.others]
    known = {name: MadeTensor((name,)) for name in config.shapes}
    found = {name: known[name] for name in wanted if name in known}
    spelled: Callable[[str], str] = str
    for format_name, library in FAMILIES[config.FAMILY].libraries.items() if config.FAMILY in FAMILIES else ():
        theirs = FAMILIES[config.FAMILY].tensors(config, format_name, every=True)
        named = {name: theirs[one] for name in wanted if (one := library.spelled(name)) in theirs}
        if len(named) > len(found):
            known, found, spelled = theirs, named, library.spelled
    if missing := sorted({*wanted} - found.keys()):
        raise DataError(
            f"'{opened.folder}' has tensors for {listed(missing)}, which {config.name} lacks by the names of vitpar, "
            "timm and transformers: use adapters of the same model"
        )
    opened.refuse_lacking(known, spelled)
    return {name: place for name, tensor in found.items() if (place := _place(tensor, config))}


def merging(source: ForeignWeights, folder: Path) -> ForeignWeights:
    """Return weights of another library with adapters of the same library's names merged into them.

    Raises DataError for adapters of other weights.
    """
    opened = _Opened(folder)
    weights = {f"{name}.weight": name for name in opened.adapters}
    if missing := sorted(({*weights} | {*opened.others}) - source.shapes.keys()):
        raise DataError(
            f"'{folder}' has tensors for {listed(missing)}, which '{source.place}' lacks: use the weights that the "
            "adapters were trained with"
        )
    opened.refuse_lacking(source.shapes)

    def read(name: str) -> Tensor:
        if name in opened.others:
            return opened.tensor(name, opened.shape(name))
        weight = source.read(name)
        if name not in weights:
            return weight
        if weight.dim() != 2:
            raise DataError(f"{shown(name)} in '{source.place}' is no matrix: use adapters of the same model")
        gives, takes = weight.shape
        a, b = opened.pair(weights[name], takes, gives)
        return torch.addmm(weight.float(), b, a, alpha=opened.settings.scale)

    shapes = {**source.shapes, **{name: opened.shape(name) for name in opened.others}}
    note = f"merged {count(len(weights), 'adapter')} of '{folder}'"
    return replace(source, shapes=shapes, read=read, notes=(*source.notes, note))
