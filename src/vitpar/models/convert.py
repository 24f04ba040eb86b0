"""Weights and configurations of other libraries, read and written by one table a family.

A family has in its module ``names`` a `Conversion`: for each library the rows of names and the
settings of config.json (``vitpar.models.rows``). The import reads a row from right to left, the export from left
to right. A row's own names may number blocks as the library does; `Conversion.layers` gives their layers in the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from vitpar.errors import DataError, ModelError
from vitpar.limits import MAX_MEASURE
from vitpar.models.config import ModelConfig
from vitpar.models.description import MadeTensor, layer_of
from vitpar.models.families import model_config
from vitpar.models.rows import Found, Library, Row, Shapes, filled, find, only_read, pattern_of


@dataclass(frozen=True)
class Exported:
    """A model as another library reads it."""

    tensors: Mapping[str, MadeTensor]
    """Tensors by the library's names."""
    config: Mapping[str, Any]
    """Content of config.json, without what is known of images."""
    classifier: Mapping[str, MadeTensor] = field(default_factory=dict)
    """Tensors of a classifier that the library's model does not have, by name."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


class Sizes:
    """Sizes of tensors by vitpar's names, of which those with several parts have them below each other."""

    def __init__(self, place: object, title: str, found: Found) -> None:
        self.place, self._title, self._found, self._names = place, title, found, found.names

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __call__(self, name: str, dim: int) -> int:
        """Return the size of a dimension of the library's tensors. Raises DataError if there is none."""
        if name not in self._names:
            raise DataError(
                f"'{self.place}' lacks {name} (vitpar's name): it is not {self._title} that vitpar supports"
            )
        shapes = [self._found.shapes[theirs] for theirs in self._names[name]]
        if any(not -len(shape) <= dim < len(shape) for shape in shapes):
            raise DataError(
                f"{name} (vitpar's name) in '{self.place}' has shape {list(shapes[0])}: it is not {self._title} that "
                "vitpar supports"
            )
        return sum(shape[0] for shape in shapes) if dim == 0 else shapes[0][dim]

    def of_patches(self) -> dict[str, int]:
        """Return patch size and channels by the projection of patches. Raises DataError for other than 3 channels."""
        name = "embed.patch_embed.proj.weight"
        if (channels := self(name, 1)) != 3:
            raise DataError(f"'{self.place}' has {channels} input channels, but only models with 3 can be imported")
        return {"patch_size": self(name, 3) or 1, "channels": channels}


class Conversion:
    """Conversions of a family from and to other libraries. Each family has a subclass."""

    family: ClassVar[type[ModelConfig]]
    """Class of its configurations."""
    title: ClassVar[str]
    """The family for messages, such as "a BERT"."""
    libraries: ClassVar[Mapping[str, Library]]
    """Libraries by the name of the format."""
    compared: ClassVar[tuple[str, ...]]
    """Fields in which tensors may not differ from the model that the user names."""
    writes: ClassVar[tuple[str, ...]] = ("transformers",)
    """Formats that models can be exported to."""

    def visible(self, size: Sizes, found: Found, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return fields of the configuration by the tensors, and by the fields that name and config.json give."""
        raise NotImplementedError

    def export(self, config: Any, format_name: str) -> Exported:
        """Return the exported model. Raises DataError for what no model has."""
        raise NotImplementedError

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields by the library's config.json. Raises DataError for what vitpar cannot compute."""
        raise NotImplementedError

    def layers(self, config: Any) -> Mapping[str, str]:
        """Return the names of layers by those in rows, where the two differ."""
        return {}

    def complete(self, found: Found) -> Found:
        """Return `found` with changes to what the names alone give."""
        return found

    def special(self, found: Found, config: Any) -> tuple[Row, ...]:
        """Return links by tensors and the inferred configuration, where rows cannot say how tensors differ."""
        return found.links

    def renamed(self, shapes: Shapes) -> Found | None:
        """Recognise the library of foreign tensors and map their names; None for another family's tensors."""
        for name, library in self.libraries.items():
            if any(re.fullmatch(library.mark, theirs) for theirs in shapes):
                return self.complete(find(name, library, shapes))
        return None

    def said(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the fields that a config.json gives, of a library or with vitpar's names. Raises DataError."""
        return self.read(config) if {"model_type", "architecture"} & config.keys() else config

    def infer_config(
        self, place: object, found: Found, said: Mapping[str, Any], model: str | None = None
    ) -> ModelConfig:
        """Return the configuration of the model.

        place: origin of the tensors, for messages.
        said: fields that config.json gives.
        model: name of the model, for fields that neither tensors nor `said` give; None if not named.

        Raises DataError for tensors that are not of the family or that contradict the name.
        Raises ModelError for an unknown name.
        """
        named = model_config(model) if model is not None else None
        if named is not None and not isinstance(named, self.family):
            raise DataError(f"'{place}' is {self.title}, not a {model}: name another model, or omit --model")
        known = {} if named is None else {f.name: getattr(named, f.name) for f in fields(named)}  # type: ignore[arg-type]
        known = {**self.libraries[found.format].usual, **known, **_typed(self.family, said)}
        try:
            shown = self.visible(Sizes(place, self.title, found), found, known)
            config = self.family(**{**known, **shown, "name": model or f"{self.family.FAMILY}_custom"})
        except ModelError as error:
            raise DataError(f"'{place}' is not a vitpar model: {error}") from None
        if named is not None:
            refuse_other_fields(place, named, config, self.compared)
        return config

    def parts(self, found: Found, config: Any) -> dict[str, MadeTensor]:
        """Return how parameters of the model are made of the tensors, by name: some may be missing or superfluous."""
        layers, made = self.layers(config), dict[str, MadeTensor]()
        for link in self.special(found, config):
            for number, name in enumerate(link.ours):
                packed = _part(link.packing.pack, config, len(link.ours) > 1, number)
                made[_placed(name, layers)] = MadeTensor(link.theirs, packed)
        return made

    def exported(self, config: ModelConfig, format_name: str) -> Exported:
        """Return the model as a library has it. Raises DataError if the library has no such model."""
        if format_name not in self.writes:
            known = " or ".join((*self.writes, "vitpar"))
            raise DataError(
                f"{config.name} can be exported to {self.writes[0]}, but not to {format_name}: use --format {known}"
            )
        return self.export(config, format_name)

    def tensors(self, config: Any, format_name: str, *, every: bool = False) -> dict[str, MadeTensor]:
        """Return the library's tensors of the model by name. Parameters that no row has are left out.

        every: whether to use all rows, also those of other versions, instead of one for each parameter.
        """
        places = dict[str, list[str]]()
        for in_rows, layer in self.layers(config).items():
            places.setdefault(layer, []).append(in_rows)
        names = dict[str, str]()
        for ours in config.shapes:
            layer = layer_of(ours)
            names |= {f"{place}{ours.removeprefix(layer)}": ours for place in places.get(layer, [layer])}
        made, used = dict[str, MadeTensor](), set[str]()
        for one in self.libraries[format_name].rows:
            if one.packing.unpack is only_read or not (every or one.written(config)):
                continue
            matches = (pattern_of(one.ours[0]).fullmatch(name) for name in names) if one.ours else [re.match("", "")]
            for match in filter(None, matches):
                given = [names.get(name, "") for name in filled(one.ours, match.groups())]
                if all(given) and (every or used.isdisjoint(given)):
                    theirs = filled(one.theirs, match.groups())
                    for number, name in enumerate(theirs):
                        unpacked = _part(one.packing.unpack, config, len(theirs) > 1, number)
                        made[name] = MadeTensor(tuple(given), unpacked)
                    used |= {*given}
        return made


def _placed(name: str, layers: Mapping[str, str]) -> str:
    """Return the name of a parameter whose layer `layers` names otherwise."""
    parts = name.split(".")
    starts = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    start = next((start for start in starts if start in layers), "")
    return layers[start] + name.removeprefix(start) if start else name


def _part(convert: Callable[..., Any], config: Any, several: bool, number: int) -> Callable[..., Tensor]:
    """Return the function from tensors to number `number` of those that a side of a packing makes of them.

    several: whether it makes several, by names of their own.
    """

    def make(*tensors: Tensor) -> Tensor:
        made = convert(config, *tensors)
        if isinstance(made, Tensor):
            return made
        return made[number] if several else torch.cat(made)

    return make


def shapes_of(place: object, made: Mapping[str, MadeTensor], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of made tensors by name, without allocating any.

    place: origin of the tensors, for messages.
    shapes: shapes of the tensors that they are made of.

    Raises DataError for shapes that no model has.
    """
    found = {}
    for name, tensor in made.items():
        try:
            given = [torch.empty(shapes[theirs], device="meta") for theirs in tensor.names]
            found[name] = tuple(tensor.make(*given).shape)
        except (RuntimeError, IndexError, ValueError):
            said = ", ".join(f"{theirs} {list(shapes[theirs])}" for theirs in tensor.names)
            raise DataError(f"'{place}' has {said}, of which {name} cannot be made: use another model") from None
    return found


def _typed(family: type[ModelConfig], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `said` that have the type of the configuration's; others are left to the tensors."""
    known = {}
    for one in fields(family):  # type: ignore[arg-type]
        value: Any = said.get(one.name)
        usable = {
            "int": type(value) is int and value > 0,
            "float": type(value) in (int, float) and abs(value) <= MAX_MEASURE,
            "bool": type(value) is bool,
        }
        if usable.get(one.type.split(" ")[0], isinstance(value, str)):
            known[one.name] = value
    return known


def refuse_other_fields(place: object, named: ModelConfig, found: ModelConfig, compared: Collection[str]) -> None:
    """Raise DataError if a field of the model that was named differs from that of the tensors."""
    for name in compared:
        values = [getattr(config, name) for config in (found, named)]
        there, wanted = (
            ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value) for value in values
        )
        if there != wanted:
            raise DataError(
                f"'{place}' is not a {named.name}: its {name} is {there} instead of {wanted}: name another model, or "
                "omit --model"
            )
