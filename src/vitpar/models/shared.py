"""Parameters that several layers share: who owns one, who has copies, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vitpar.errors import ModelError
from vitpar.models.description import LayerDescription, Part
from vitpar.text import shown

MOST_OF_A_TABLE = 2**18
"""Elements of a table at most, 1 MiB in float32: every rank keeps all of it."""


def parameter_holders(
    layers: Mapping[str, LayerDescription], shared: Mapping[str, str], model: str
) -> dict[str, tuple[str, ...]]:
    """Return the names of each shared parameter and each table in the layers, the owner's first, by that name.

    layers: those of the model called `model`, in order.
    shared: owners by the names of their copies (``ModelConfig.shared``).

    Raises ModelError for names that do not exist, an owner behind its copy, and copies of another shape or role.
    """
    parts = {
        f"{layer.name}.{name}": (number, part, shape)
        for number, layer in enumerate(layers.values())
        for part in layer.parts
        for name, shape in part.parameters.items()
    }
    holders: dict[str, list[str]] = {
        name: [name]
        for name, (_, part, _) in parts.items()
        if name in shared.values() or (name not in shared and part.role == "table")
    }
    for copy, owner in shared.items():
        for name in (copy, owner):
            if name not in parts:
                raise ModelError(f"{model} shares '{shown(name)}', which no layer has: correct the name")
        if owner in shared:
            raise ModelError(f"{model} shares {owner}, which is a copy itself: name the owner {shared[owner]}")
        (behind, mine, shape), (before, theirs, whole) = parts[copy], parts[owner]
        if before >= behind:
            raise ModelError(f"{copy} of {model} is a copy of {owner}, which comes later: let the first layer own it")
        if shape != whole or (mine.role == "table") != (theirs.role == "table"):
            raise ModelError(
                f"{copy} of {model} is {_words(mine, shape)}, but its owner {owner} is {_words(theirs, whole)}: "
                "make them alike"
            )
        holders[owner].append(copy)
    for name in holders:
        _, part, shape = parts[name]
        if part.role == "table" and math.prod(shape) > MOST_OF_A_TABLE:
            raise ModelError(
                f"{name} of {model} has {math.prod(shape):,} elements, and every rank keeps all of a table: give it "
                f"another role, or at most {MOST_OF_A_TABLE:,}"
            )
    return {name: tuple(names) for name, names in holders.items()}


def _words(part: Part, shape: tuple[int, ...]) -> str:
    return f"{'a table' if part.role == 'table' else 'a parameter'} of shape {list(shape)}"
