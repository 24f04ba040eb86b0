"""Published models, and what a model consists of."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Collection
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from vitpar.models.config import ModelConfig
from vitpar.models.description import block_index, is_block
from vitpar.models.families import FAMILIES
from vitpar.text import divisors

FIXED = ("name", "num_classes", "channels")
"""Fields of configurations that no recipe sets: the data decide them, or the name itself."""


@dataclass(frozen=True)
class ModelEntry:
    """A model and its size."""

    name: str
    """Name of the model."""
    family: str
    """Name of its family."""
    parameters: int
    """Parameters, including the classifier."""
    forward_flops: int
    """Floating-point operations of one image's forward, matrix products only; a multiply-add counts as two."""
    tokens: tuple[int, int]
    """Tokens of an image that enter the first block and leave the last one."""
    features: tuple[int, int]
    """Features of these tokens."""
    image_size: int
    """Height and width of images, in pixels."""


@dataclass(frozen=True)
class KindEntry:
    """Layers of a model that have equal shapes and costs."""

    kind: str
    """Name of the kind."""
    layers: str
    """Names of the layers, such as `embed` or `blocks.0-11`."""
    parameters: int
    """Parameters of one layer."""
    forward_flops: int
    """Floating-point operations of one layer for one image, counted as in `ModelEntry`."""
    tokens: int
    """Tokens that a layer gives."""
    features: int
    """Features of these tokens."""
    tp: tuple[int, ...] | None
    """Degrees of tensor parallelism that divide the layer, without 1; None for all."""
    modes: tuple[str, ...]
    """Tensor-parallel modes."""


def published(part: str = "") -> list[ModelEntry]:
    """Return the models that have a published name.

    part: name of a family, or part of a model's name, in which `*` and `?` stand for any text and any character.
    """
    every = [(one, name) for one in FAMILIES.values() for name in one.published()]
    if part in {one.FAMILY for one, _ in every}:
        wanted = [pair for pair in every if part == pair[0].FAMILY]
    else:
        wanted = [pair for pair in every if fnmatchcase(pair[1], f"*{part.lower()}*")]
    return [entry(family.named(name, {})) for family, name in wanted]


def entry(config: ModelConfig) -> ModelEntry:
    """Return a model's size."""
    enter, leave = (config.layers[name].gives for name in (config.layer_names[0], config.layer_names[-2]))
    tokens, features = (enter.tokens, leave.tokens), (enter.features, leave.features)
    # A training step counts as three times the forward.
    return ModelEntry(
        config.name, config.FAMILY, config.parameters, config.flops // 3, tokens, features, config.image_size
    )


def kinds(config: ModelConfig) -> list[KindEntry]:
    """Return the kinds of a model's layers, in order."""
    names: dict[str, list[str]] = {}
    for layer in config.layers.values():
        names.setdefault(layer.kind, []).append(layer.name)
    entries = []
    for kind, layer in config.kinds.items():
        numbers = layer.divisible.values()
        tp = tuple(divisors(math.gcd(*numbers))[1:]) if numbers else None
        shape = layer.gives
        entries.append(
            KindEntry(
                *(kind, _ranges(names[kind]), layer.numel, layer.flops // 3, shape.tokens, shape.features),
                tp if "1d" in layer.modes else (),
                layer.modes,
            )
        )
    return entries


def common_tp(config: ModelConfig) -> tuple[int, ...]:
    """Return the degrees of tensor parallelism, without 1, that divide all layers of a model."""
    numbers = [number for layer in config.layers.values() for number in layer.divisible.values()]
    usable = numbers and all("1d" in layer.modes for layer in config.layers.values())
    return tuple(divisors(math.gcd(*numbers))[1:]) if usable else ()


def options(config: ModelConfig) -> dict[str, str]:
    """Return the effects of the fields that recipes may set, by name; empty if their class does not say."""
    effects: dict[str, str] = {}
    for parent in reversed(type(config).__mro__):
        if issubclass(parent, ModelConfig):
            effects |= _docstrings(parent)
    names = [field.name for field in fields(config) if field.name not in FIXED]  # type: ignore[arg-type]
    return {name: effects.get(name, "") for name in names}


def _ranges(names: Collection[str]) -> str:
    """Return names of layers, those of blocks as ranges: `embed`, `blocks.0-3,5`."""
    others, parts = [name for name in names if not is_block(name)], list[list[int]]()
    for index in (block_index(name) for name in names if is_block(name)):
        if parts and parts[-1][-1] + 1 == index:
            parts[-1].append(index)
        else:
            parts.append([index])
    words = ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return ", ".join([*others, *([f"blocks.{words}"] if words else [])])


def _docstrings(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class; empty without its source."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    assert isinstance(node, ast.ClassDef)
    docstrings = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings[field.target.id] = " ".join(value.value.split())
    return docstrings
