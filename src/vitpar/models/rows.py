"""Rows of a table of names: the same tensors in vitpar and in another library, and how they differ.

Names are templates: ``{}`` is a number and ``*`` is weight or bias, the same ones in the same order on both sides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
from einops import rearrange
from torch import Tensor

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
