"""Parameters and configurations of other libraries, read and written by one table.

A family has in its module ``names`` a `Conversion`: for each library rows of names, and settings of config.json. A row
pairs vitpar's names with the library's, and its packing computes the tensors of one from those of the other. The import
reads a row from right to left, the export from left to right.

Names are templates: ``{}`` is a number and ``*`` is weight or bias, the same ones in the same order on both sides. A
row's own names may number blocks as the library does; `Conversion.layers` gives their layers in the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NoReturn

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError, ModelError
from vitpar.limits import MAX_MEASURE
from vitpar.models.config import ModelConfig
from vitpar.models.families import model_config
from vitpar.text import literal

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


@dataclass(frozen=True)
class MadeTensor:
    """Tensor of one model that is made of tensors of another."""

    names: tuple[str, ...]
    """Names of the other model's tensors."""
    make: Callable[..., Tensor] = lambda tensor: tensor
    """Function from these, in the order of `names`, to the tensor."""


@dataclass(frozen=True)
class Adapted:
    """Weights of another configuration, for a model to begin its training with."""

    config: Any
    """Configuration (``ModelConfig``) that the tensors are of."""
    tensors: Mapping[str, MadeTensor]
    """How parameters are made of the weights', by name; others are the same."""
    change: str
    """The difference, for the user."""
    kept: tuple[str, ...] = ()
    """Parameters that keep their initial values."""


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


@dataclass(frozen=True)
class Packing:
    """Two functions that undo each other. Both take the configuration first, and return a tuple for several names."""

    pack: Callable[..., Any]
    """Function from the library's tensors to vitpar's."""
    unpack: Callable[..., Any]
    """Function from vitpar's tensors to the library's; `only_read` if there is none."""


def only_read(config: Any, *tensors: Tensor) -> NoReturn:
    """Stand for the second function of a packing that no export needs."""
    raise AssertionError("these tensors are only read")


SAME = Packing(lambda c, tensor: tensor, lambda c, tensor: tensor)
"""Equal tensors."""
KERNEL = Packing(
    lambda c, kernel: kernel.flatten(1),
    lambda c, weight: rearrange(weight, "d (c p q) -> d c p q", c=c.channels, p=c.patch_size),
)
"""A projection of patches that is a convolution."""
TABLE = Packing(lambda c, table: table[None], lambda c, table: table[0])
"""A table without the dimension of samples."""


def interleaved(parts: int, groups: Callable[[Any, int], int]) -> Packing:
    """Return the packing of rows ordered (part, group, feature), in one tensor or one a part; ours is (group, part, …).

    groups: function from the configuration and the rows of a part to their groups, such as attention heads.
    """

    def pack(c: Any, *tensors: Tensor) -> Tensor:
        rows = torch.cat(tensors)
        return rearrange(rows, "(n h d) ... -> (h n d) ...", n=parts, h=groups(c, len(rows) // parts))

    def unpack(c: Any, rows: Tensor) -> tuple[Tensor, ...]:
        return rearrange(rows, "(h n d) ... -> n (h d) ...", n=parts, h=groups(c, len(rows) // parts)).unbind()

    return Packing(pack, unpack)


def heads(parts: int, field: str = "num_heads") -> Packing:
    """Return the packing of queries, keys and values (3), or of keys and values (2). field: the number of heads."""
    return interleaved(parts, lambda c, rows: getattr(c, field))


GATES = interleaved(2, lambda c, rows: c.mlp_hidden_dim)
"""Gates and values of an MLP, which alternate in vitpar."""


@dataclass(frozen=True)
class Row:
    """Names of tensors that have the same numbers in two libraries."""

    ours: tuple[str, ...]
    """Names in vitpar; none for a tensor that only the library stores, which the packing returns or None."""
    theirs: tuple[str, ...]
    """Names in the library. A packing may return several tensors for one name, which then has them below each other."""
    packing: Packing = SAME
    """How the tensors differ."""
    written: Callable[[Any], bool] = lambda config: True
    """Whether a model of this configuration is exported by this row."""


def row(ours: str, theirs: str | Sequence[str], packing: Packing = SAME, **options: Any) -> Row:
    """Return the row of one parameter of vitpar."""
    return Row((ours,), (theirs,) if isinstance(theirs, str) else tuple(theirs), packing, **options)


def stored(theirs: str, make: Callable[[Any], Tensor | None], **options: Any) -> Row:
    """Return the row of a tensor that only the library stores."""
    return Row((), (theirs,), Packing(lambda c, tensor: (), lambda c: make(c)), **options)


def never(config: Any) -> bool:
    """Return False: a row that is only read."""
    return False


_PARTS = re.compile(r"\{\}|\*")


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d{1,4})").replace(r"\*", "(weight|bias)"))


def _filled(templates: Iterable[str], values: Sequence[str]) -> tuple[str, ...]:
    """Return names of which `values` are the numbers and ends."""
    return tuple(_PARTS.sub("%s", template) % tuple(values) for template in templates)


@dataclass(frozen=True)
class ConfigKey:
    """A setting of config.json that is a field of a configuration."""

    key: str
    """Name in config.json."""
    field: str
    """Name of vitpar's field."""
    words: Mapping[str, Any] | None = None
    """Its values in vitpar by those in config.json, others are refused; None for numbers, which are the same."""
    usual: Any = None
    """Value of a config.json without it; None if the field is then unknown."""

    def read(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Return the field by name, or nothing. Raises DataError for a word that vitpar lacks, and for no number."""
        value = said.get(self.key, self.usual)
        if self.words is None:
            usable = value is None or isinstance(value, list | int | float)  # a list has one number a dimension
            if not usable or (isinstance(value, int | float) and not abs(value) <= MAX_MEASURE):
                raise DataError(f"config.json has {self.key} {literal(value)}, which is not a number: correct it")
            return {self.field: value} if isinstance(value, int | float) else {}
        if value is None:
            return {}
        if not isinstance(value, str) or value not in self.words:
            refuse_word(self.key, value, self.words)
        return {self.field: self.words[value]}

    def written(self, config: Any) -> dict[str, Any]:
        """Return the setting by name."""
        value = getattr(config, self.field)
        if self.words is not None:
            value = next(theirs for theirs, ours in self.words.items() if ours == value)
        return {self.key: value}


def settings_of(config: Any, settings: Iterable[ConfigKey]) -> dict[str, Any]:
    """Return the settings of config.json that a configuration has."""
    return {key: value for setting in settings for key, value in setting.written(config).items()}


def read_settings(
    said: Mapping[str, Any], settings: Iterable[ConfigKey], fixed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the fields that a config.json gives.

    fixed: settings that have one value, which is also the usual one.

    Raises DataError for a model that computes differently from vitpar's.
    """
    for key, word in (fixed or {}).items():
        if said.get(key, word) != word:
            refuse_word(key, said[key], (word,))
    return {name: value for setting in settings for name, value in setting.read(said).items()}


def refuse_word(key: str, word: object, known: Iterable[str]) -> NoReturn:
    """Raise DataError for a word in config.json that vitpar lacks."""
    raise DataError(f"config.json has {key} {literal(word)}, but only {', '.join(known)} can be imported")


def input_size(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image size that a config.json of timm gives, by the field's name."""
    own = said.get("pretrained_cfg")
    size = {**said, **(own if isinstance(own, dict) else {})}.get("input_size")
    return {"image_size": size[-1]} if isinstance(size, list) and size else {}


def _typed(family: type[ModelConfig], said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `said` that have the type of the configuration's; others are left to the tensors."""
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "bool": bool}
    types = {f.name: f.type.split(" ")[0] for f in fields(family) if f.name in said}  # type: ignore[arg-type]
    return {
        name: value
        for name, kind in types.items()
        if isinstance(value := said[name], kinds.get(kind, str))
        and (kind == "bool" or (not isinstance(value, bool) and (kind != "int" or value > 0)))
    }


@dataclass(frozen=True)
class Library:
    """Names that another library gives the tensors of a family."""

    mark: str
    """Regular expression of a name that only this library and family has."""
    rows: tuple[Row, ...]
    """Names of tensors. Of several rows that fit, the first counts."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Regular expressions of parts of other versions' names, and the replacements that give names of `rows`."""
    needless: tuple[tuple[str, str], ...] = ()
    """Regular expressions of tensors that vitpar does not need, and a sentence for the user or ""."""
    usual: Mapping[str, Any] = field(default_factory=dict)
    """Fields whose default in the library is another than vitpar's."""

    def spelled(self, name: str) -> str:
        """Return a name of `rows` for that of any version."""
        for pattern, replacement in self.spellings:
            name = re.sub(pattern, replacement, name)
        return name


@dataclass(frozen=True)
class LinkedTensors:
    """Tensors of a file and the parameters that they are."""

    ours: tuple[str, ...]
    """Names of the parameters, whose blocks are numbered as the library does."""
    theirs: tuple[str, ...]
    """Names of the tensors."""
    packing: Packing
    """How they differ."""


@dataclass(frozen=True)
class Found:
    """Tensors of another library whose names are known."""

    format: str
    """Name of the library, such as "timm" or "transformers"."""
    shapes: Shapes
    """Shapes of all tensors by the library's names."""
    links: tuple[LinkedTensors, ...]
    """Tensors that are parameters."""
    unknown: tuple[str, ...] = ()
    """Names that the library does not have."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors by the name of a parameter, whose blocks are numbered as the library does."""
        return {ours: link.theirs for link in self.links for ours in link.ours}

    def count(self, start: str) -> int:
        """Return the number of blocks whose names begin with `start` and a number."""
        numbers = [int(m[1]) for name in self.names if (m := re.match(rf"{re.escape(start)}\.(\d+)\.", name))]
        return max(numbers, default=-1) + 1


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


@dataclass(frozen=True)
class Conversion:
    """Conversions of a family from and to other libraries."""

    family: type[ModelConfig]
    """Class of its configurations."""
    title: str
    """The family for messages, such as "a BERT"."""
    libraries: Mapping[str, Library]
    """Libraries by the name of the format."""
    visible: Callable[[Sizes, Found, Mapping[str, Any]], Mapping[str, Any]]
    """Function from the tensors, and the fields that name and config.json give, to fields of the configuration."""
    export: Callable[[Any, str], Exported]
    """Function from a configuration and a format to the exported model. Raises DataError for what no model has."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Function from the library's config.json to fields. Raises DataError for what vitpar cannot compute."""
    compared: tuple[str, ...]
    """Fields in which tensors may not differ from the model that the user names."""
    writes: tuple[str, ...] = ("transformers",)
    """Formats that models can be exported to."""
    layers: Callable[[Any], Mapping[str, str]] = lambda config: {}
    """Function from a configuration to the names of layers by those in rows, where the two differ."""
    complete: Callable[[Found], Found] = lambda found: found
    """Function that changes what the names alone give."""
    special: Callable[[Found, Any], tuple[LinkedTensors, ...]] = lambda found, config: found.links
    """Function from tensors and the inferred configuration to links, where rows cannot say how tensors differ."""

    def renamed(self, shapes: Shapes) -> Found | None:
        """Recognise the library of foreign tensors and map their names; None for another family's tensors."""
        for name, library in self.libraries.items():
            if any(re.fullmatch(library.mark, theirs) for theirs in shapes):
                return self.complete(_found(name, library, shapes))
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
                made[_placed(name, layers)] = MadeTensor(link.theirs, _packed(config, link, number))
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
        return _written(config, self.libraries[format_name].rows, self.layers(config), every)


def _found(format_name: str, library: Library, shapes: Shapes) -> Found:
    skipped, notes, names = set[str](), dict[str, None](), dict[str, str]()
    for name in shapes:
        for pattern, note in library.needless:
            if re.fullmatch(pattern, name):
                skipped.add(name)
                notes |= {note: None} if note else {}
        if name not in skipped:
            names.setdefault(library.spelled(name), name)
    groups = dict[tuple[int, tuple[str, ...]], dict[str, str]]()
    for spelled, name in names.items():
        for number, one in enumerate(library.rows):
            for template in one.theirs:
                if match := _pattern(template).fullmatch(spelled):
                    groups.setdefault((number, match.groups()), {})[template] = name
    links, used, made = list[LinkedTensors](), set[str](), set[str]()
    for (number, values), given in sorted(groups.items(), key=lambda group: group[0][0]):
        one = library.rows[number]
        ours = _filled(one.ours, values)
        if len(given) == len(one.theirs) and used.isdisjoint(given.values()) and made.isdisjoint(ours):
            links.append(LinkedTensors(ours, tuple(given[name] for name in one.theirs), one.packing))
            used |= {*given.values()}
            made |= {*ours}
    unknown = tuple(name for name in shapes if name not in skipped and name not in used)
    return Found(format_name, shapes, tuple(links), unknown, tuple(notes))


def _placed(name: str, layers: Mapping[str, str]) -> str:
    """Return the name of a parameter whose layer `layers` names otherwise."""
    parts = name.split(".")
    starts = (".".join(parts[:length]) for length in range(len(parts) - 1, 0, -1))
    start = next((start for start in starts if start in layers), "")
    return layers[start] + name.removeprefix(start) if start else name


def _packed(config: Any, link: LinkedTensors, number: int) -> Callable[..., Tensor]:
    def make(*tensors: Tensor) -> Tensor:
        made = link.packing.pack(config, *tensors)
        return made if len(link.ours) == 1 else made[number]

    return make


def _written(config: Any, rows: Iterable[Row], layers: Mapping[str, str], every: bool) -> dict[str, MadeTensor]:
    """Return the tensors that rows make of a model's parameters. layers: names of its layers by those in rows."""
    places = dict[str, list[str]]()
    for in_rows, layer in layers.items():
        places.setdefault(layer, []).append(in_rows)
    names = dict[str, str]()
    for layer in config.layers.values():
        for parameter in layer.parameters:
            if (ours := f"{layer.name}.{parameter}") not in config.shared:
                names |= {f"{place}.{parameter}": ours for place in places.get(layer.name, [layer.name])}
    made, used = dict[str, MadeTensor](), set[str]()
    for one in rows:
        if one.packing.unpack is only_read or not (every or one.written(config)):
            continue
        matches = (_pattern(one.ours[0]).fullmatch(name) for name in names) if one.ours else [re.match("", "")]
        for match in filter(None, matches):
            given = [names.get(name, "") for name in _filled(one.ours, match.groups())]
            if all(given) and (every or used.isdisjoint(given)):
                theirs = _filled(one.theirs, match.groups())
                for number, name in enumerate(theirs):
                    made[name] = MadeTensor(tuple(given), _unpacked(config, one, number))
                used |= {*given}
    return made


def _unpacked(config: Any, one: Row, number: int) -> Callable[..., Tensor]:
    def make(*tensors: Tensor) -> Tensor:
        made = one.packing.unpack(config, *tensors)
        if isinstance(made, Tensor):
            return made
        return made[number] if len(one.theirs) > 1 else torch.cat(made)

    return make


def parameters_of(config: ModelConfig) -> set[str]:
    """Return the names of a model's parameters; of shared ones, the owner's."""
    names = {f"{layer.name}.{name}" for layer in config.layers.values() for name in layer.parameters}
    return names - config.shared.keys()


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


def refuse_other_fields(place: object, named: ModelConfig, found: ModelConfig, compared: Collection[str]) -> None:
    """Raise DataError if a field of the model that was named differs from that of the tensors."""
    for name in compared:
        there, wanted = (_listed(getattr(config, name)) for config in (found, named))
        if there != wanted:
            raise DataError(
                f"'{place}' is not a {named.name}: its {name} is {there} instead of {wanted}: name another model, or "
                "omit --model"
            )


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def refuse_other_parts(config: Any, library: str, parts: Mapping[str, Collection[Any]]) -> None:
    """Raise DataError if a field has a value that models of `library` cannot have. parts: values by field."""
    values = {name: getattr(config, name) for name in parts}
    if other := [f"{name} {literal(value)}" for name, value in values.items() if value not in parts[name]]:
        raise DataError(f"{config.name} has {', '.join(other)}, which no model of {library} has: use --format vitpar")


def shortest_ratio(width: int, features: int) -> float:
    """Return the shortest ratio for which int(width · ratio) is `features`, as timm computes it."""
    exact = features / width
    for ratio in (*(round(exact, digits) for digits in range(8)), exact):
        if int(width * ratio) == features:
            return ratio
    return math.nextafter(exact, math.inf)
