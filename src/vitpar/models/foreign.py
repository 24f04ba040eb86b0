"""Common parts of the conversions of parameters from other libraries, which each family has in its module ``foreign``.

That module has

- ``renamed(shapes)``: recognise the format of foreign tensors and map their names to vitpar's; None for another family.
- ``infer_config(place, tensors, hints, model)``: the configuration of the model that the tensors belong to.
- ``parts(tensors, config)``: how each parameter of vitpar is made of the tensors.

and, where its parameters can leave vitpar, in its module ``exporting`` the function ``exported(config, format_name)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from vitpar.errors import DataError

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors by name."""
Patterns = tuple[tuple[str, str], ...]
"""Pairs of a regular expression of a format's names and the template of vitpar's name."""


@dataclass(frozen=True)
class Renamed:
    """Foreign tensors under vitpar's names, except that separate q, k and v remain separate."""

    format: str
    """Format of the foreign names: "vitpar", "timm", "transformers" or the name of another source."""
    names: Mapping[str, str]
    """Foreign names by vitpar's names."""
    shapes: Shapes
    """Shapes of the foreign tensors by vitpar's names."""
    unknown: tuple[str, ...] = ()
    """Foreign names that the format does not have."""
    skipped: Shapes = field(default_factory=dict)
    """Shapes of tensors that are no parameters, by foreign name."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


@dataclass(frozen=True)
class MappedParameter:
    """Parameter of vitpar that is made of foreign tensors."""

    names: tuple[str, ...]
    """Names of the foreign tensors."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    make: Callable[..., Tensor] = lambda tensor: tensor
    """Function from the foreign tensors, in the order of `names`, to the parameter."""


@dataclass(frozen=True)
class ExportedTensor:
    """Foreign tensor that is made of parameters of vitpar."""

    names: tuple[str, ...]
    """Names of the parameters."""
    make: Callable[..., Tensor] = lambda tensor: tensor
    """Function from the parameters, in the order of `names`, to the tensor."""


@dataclass(frozen=True)
class Adapted:
    """Weights of another configuration, for a model to begin its training with."""

    config: Any
    """Configuration (``ModelConfig``) that the tensors are of."""
    tensors: Mapping[str, ExportedTensor]
    """How parameters are made of the weights', by name; others are the same."""
    change: str
    """The difference, for the user."""
    kept: tuple[str, ...] = ()
    """Parameters that keep their initial values."""


@dataclass(frozen=True)
class Exported:
    """A model as another library reads it."""

    tensors: Mapping[str, ExportedTensor]
    """Tensors by foreign name."""
    config: Mapping[str, Any]
    """Content of config.json, without what is known of images."""
    classifier: Mapping[str, ExportedTensor] = field(default_factory=dict)
    """Tensors of a classifier that the library's model does not have, by name."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""


class ImportHints(Protocol):
    """Settings of any family from the files next to the tensors; None for those that are not given."""

    @property
    def image_size(self) -> int | None:
        """Height and width of images in pixels."""

    @property
    def patch_size(self) -> int | None:
        """Height and width of patches in pixels."""

    @property
    def norm_eps(self) -> float | None:
        """Epsilon of LayerNorms."""


def format_of(marks: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the format of which a name is the mark, or None.

    marks: regular expression of a name that only this format has, by format.
    """
    there = list(names)
    return next((f for f, mark in marks.items() if any(re.fullmatch(mark, name) for name in there)), None)


def mapped(names: Iterable[str], patterns: Patterns) -> tuple[dict[str, str], list[str]]:
    """Return foreign names by the name that the first matching pattern gives, and the names without one.

    A second name that gives the same counts as one without.
    """
    foreign_names, unknown = dict[str, str](), list[str]()
    for name in names:
        matches = ((re.fullmatch(pattern, name), template) for pattern, template in patterns)
        given = next((match.expand(template) for match, template in matches if match), None)
        if given is None or given in foreign_names:
            unknown.append(name)
        else:
            foreign_names[given] = name
    return foreign_names, unknown


def dimension(place: object, shapes: Shapes, name: str, dim: int, model: str) -> int:
    """Return the size of a tensor's dimension.

    place: origin of the tensors, for messages.
    model: what the tensors should be of, such as "a Swin Transformer".

    Raises DataError if the tensor or the dimension does not exist.
    """
    shape = shapes.get(name)
    if shape is None:
        raise DataError(f"'{place}' lacks {name} (vitpar's name): it is not {model} that vitpar supports")
    if dim >= len(shape):
        raise DataError(
            f"{name} (vitpar's name) in '{place}' has shape {list(shape)}: it is not {model} that vitpar supports"
        )
    return shape[dim]
