"""Common parts of the conversions of models of text from and to transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError
from vitpar.models.exporting import rows
from vitpar.models.foreign import ExportedTensor, ImportHints, MappedParameter, Patterns, Renamed, Shapes, mapped

VITPAR: Patterns = ((r"((?:embed|blocks\.\d{1,4}|head)\..+)", r"\1"),)
"""Names of vitpar's own format."""


class TextHints(ImportHints, Protocol):
    """Settings of models of text from the files next to the tensors, or None."""

    @property
    def heads(self) -> int | None:
        """Number of attention heads."""

    @property
    def text(self) -> Mapping[str, Any]:
        """Fields of the configuration that no tensor shows, by name."""


def renamed_by(format_name: str, shapes: Shapes, patterns: Patterns, skipped: re.Pattern[str], note: str) -> Renamed:
    """Map foreign names to vitpar's.

    skipped: pattern of the names of tensors that vitpar's model does not need.
    note: sentence for the user if parameters are among these; they are those without ``_ids`` at the end.
    """
    out = {name: shape for name, shape in shapes.items() if format_name != "vitpar" and skipped.fullmatch(name)}
    names, unknown = mapped((name for name in shapes if name not in out), patterns)
    ours = {name: shapes[foreign] for name, foreign in names.items()}
    notes = (note,) if any(not name.endswith("_ids") for name in out) else ()
    return Renamed(format_name, names, ours, tuple(unknown), out, notes)


def num_blocks(names: Iterable[str], block: str) -> int:
    """Return the number of blocks. block: regular expression of the begin of their names; its group is the number."""
    numbers = [int(match[1]) for name in names if (match := re.match(block, name))]
    return max(numbers, default=-1) + 1


def fuse(made: dict[str, MappedParameter], name: str, parts: tuple[str, ...], groups: int) -> None:
    """Make the parameter `name` of several tensors, with rows ordered (group, part, feature), if all are there.

    parts: names of the tensors.
    groups: number of groups of rows: heads, or hidden features for gates and values.
    """
    if any(part not in made for part in parts):
        return
    tensors = [made.pop(part) for part in parts]
    if len({tensor.shape for tensor in tensors}) > 1 or not tensors[0].shape or tensors[0].shape[0] % groups:
        return  # refused as missing

    def ordered(*given: Tensor) -> Tensor:
        return rearrange(torch.cat(given), "(n h d) ... -> (h n d) ...", n=len(parts), h=groups)

    first, *others = tensors[0].shape
    made[name] = MappedParameter(tuple(tensor.names[0] for tensor in tensors), (len(parts) * first, *others), ordered)


def separated(ours: str, theirs: Iterable[str], groups: int) -> dict[str, ExportedTensor]:
    """Return the tensors that `fuse` made the parameter `ours` of, by foreign name."""
    names = list(theirs)
    return {name: ExportedTensor((ours,), rows(groups, len(names), n)) for n, name in enumerate(names)}


def refuse_other_fields(place: object, model: str, named: object, found: object, fields: Iterable[str]) -> None:
    """Raise DataError if a field of the model that was named differs from that of the tensors."""
    for field in fields:
        if getattr(named, field) != getattr(found, field):
            raise DataError(
                f"'{place}' is not a {model}: its {field} is {getattr(found, field)} instead of "
                f"{getattr(named, field)}: name another model, or omit --model"
            )
