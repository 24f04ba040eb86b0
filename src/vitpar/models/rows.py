"""Tables of another library: names of the same tensors there and in vitpar, and settings of config.json as fields.

Names of tensors are templates: ``{}`` is a number and ``*`` is weight or bias, the same ones in the same order on both
sides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError
from vitpar.limits import MAX_MEASURE
from vitpar.text import literal

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""


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
    """Names in vitpar; none for a tensor that only the library stores, which the packing computes."""
    theirs: tuple[str, ...]
    """Names in the library. A packing may return several tensors for one name, which then has them below each other."""
    packing: Packing = SAME
    """How the tensors differ."""
    written: Callable[[Any], bool] = lambda config: True
    """Whether a model of this configuration is exported by this row."""


def row(ours: str, theirs: str | Sequence[str], packing: Packing = SAME, **options: Any) -> Row:
    """Return the row of one parameter of vitpar."""
    return Row((ours,), (theirs,) if isinstance(theirs, str) else tuple(theirs), packing, **options)


def stored(theirs: str, make: Callable[[Any], Tensor], **options: Any) -> Row:
    """Return the row of a tensor that only the library stores."""
    return Row((), (theirs,), Packing(lambda c, tensor: (), lambda c: make(c)), **options)


def never(config: Any) -> bool:
    """Return False: a row that is only read."""
    return False


_PARTS = re.compile(r"\{\}|\*")


@cache
def pattern_of(template: str) -> re.Pattern[str]:
    """Return the regular expression of a template, whose groups are its numbers and ends."""
    return re.compile(re.escape(template).replace(r"\{\}", r"(\d{1,4})").replace(r"\*", "(weight|bias)"))


def filled(templates: Iterable[str], values: Sequence[str]) -> tuple[str, ...]:
    """Return names of which `values` are the numbers and ends."""
    return tuple(_PARTS.sub("%s", template) % tuple(values) for template in templates)


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
class Found:
    """Tensors of another library whose names are known."""

    format: str
    """Name of the library, such as "timm" or "transformers"."""
    shapes: Shapes
    """Shapes of all tensors by the library's names."""
    links: tuple[Row, ...]
    """Tensors that are parameters: rows with numbers and ends, and theirs with the names in the file."""
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


def find(format_name: str, library: Library, shapes: Shapes) -> Found:
    """Return the tensors that the rows of a library have, each in the first row whose tensors are all there.

    shapes: shapes of the tensors by the names in the file.
    """
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
                if match := pattern_of(template).fullmatch(spelled):
                    groups.setdefault((number, match.groups()), {})[template] = name
    links, used, made = list[Row](), set[str](), set[str]()
    for (number, values), given in sorted(groups.items(), key=lambda group: group[0][0]):
        one = library.rows[number]
        ours = filled(one.ours, values)
        if len(given) == len(one.theirs) and used.isdisjoint(given.values()) and made.isdisjoint(ours):
            links.append(Row(ours, tuple(given[name] for name in one.theirs), one.packing))
            used |= {*given.values()}
            made |= {*ours}
    unknown = tuple(name for name in shapes if name not in skipped and name not in used)
    return Found(format_name, shapes, tuple(links), unknown, tuple(notes))


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


def numbers(**fields: str) -> tuple[ConfigKey, ...]:
    """Return settings that are numbers. fields: names of vitpar's fields by those in config.json."""
    return tuple(ConfigKey(key, name) for key, name in fields.items())


TRANSFORMERS = (
    *numbers(hidden_size="embed_dim", num_hidden_layers="depth", num_attention_heads="num_heads"),
    *numbers(intermediate_size="mlp_hidden_dim", layer_norm_eps="norm_eps"),
)
"""Settings of most models of transformers."""
TRANSFORMERS_IMAGES = (
    *TRANSFORMERS,
    *numbers(image_size="image_size", patch_size="patch_size", num_channels="channels"),
)
"""Settings of its models of images."""
TIMM = (
    *numbers(img_size="image_size", patch_size="patch_size", in_chans="channels"),
    *numbers(embed_dim="embed_dim", num_heads="num_heads", drop_path_rate="drop_path"),
)
"""Arguments of timm's models, which an export writes."""


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


def refuse_other_parts(config: Any, library: str, parts: Mapping[str, Collection[Any]]) -> None:
    """Raise DataError if a field has a value that models of `library` cannot have. parts: values by field."""
    values = {name: getattr(config, name) for name in parts}
    if other := [f"{name} {literal(value)}" for name, value in values.items() if value not in parts[name]]:
        raise DataError(f"{config.name} has {', '.join(other)}, which no model of {library} has: use --format vitpar")


def shortest_ratio(widths: Sequence[int], hidden: Sequence[int]) -> float:
    """Return the shortest ratio for which int(width · ratio) are the hidden features, or those of the first width."""
    exact = [features / max(1, width) for width, features in zip(widths, hidden, strict=True)]
    rounded = [round(each, digits) for digits in range(8) for each in exact]
    # The quotient may be rounded down, and its product with the width then to the next lower number.
    for ratio in (*rounded, *exact, *(math.nextafter(each, math.inf) for each in exact)):
        if [int(width * ratio) for width in widths] == [*hidden]:
            return ratio
    return exact[0]
