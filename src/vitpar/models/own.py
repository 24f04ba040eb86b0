"""Models of the user: a configuration class and layers in a file of their own, which vitpar runs as any other.

A file may hold::

    @dataclass(frozen=True)
    class Mixer(vitpar.OwnModel):
        width: int = 64
        depth: int = 8

        def build_layer(self, name: str) -> vitpar.Layer: ...

Its layers are described by running each once on the meta device. ``examples/own_model.py`` is complete, and
docs/own-model.md explains it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vitpar.errors import ModelError
from vitpar.limits import MAX_BLOCKS
from vitpar.models.bases import check_ranges
from vitpar.models.config import ModelConfig, Rules, late_module
from vitpar.models.description import LayerDescription
from vitpar.models.families import FAMILIES
from vitpar.own_files import load_class
from vitpar.text import shown

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class OwnModel(ModelConfig):
    """Base of the configurations of models that users write.

    Subclasses are frozen dataclasses whose fields all have defaults. They define `build_layer`.
    """

    FAMILY: ClassVar[str] = "own"

    name: str = "own"
    """Name of the model; messages use it."""
    image_size: int = 224
    """Side of the square input image, in pixels."""
    channels: int = 3
    """Channels of an input image."""
    num_classes: int = 1000
    """Outputs of the classifier."""
    depth: int = 12
    """Number of blocks."""

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def stochastic(self) -> bool:
        return False

    @classmethod
    def knows(cls, name: str) -> bool:
        return PurePath(name).name == cls.FAMILY

    @classmethod
    def named(cls, name: str, options: Mapping[str, Any]) -> Self:
        try:
            return cls(**{"name": name, **options})
        except TypeError as error:  # a field without default, or of another type than the class computes with
            raise ModelError(f"{shown(name)} cannot be built: {shown(error)}") from None

    def build_layer(self, name: str) -> nn.Module:
        raise NotImplementedError

    def initial_rules(self) -> Rules:
        rules: Rules = late_module("vitpar.models.initial").PLAIN
        return rules

    def describe(self) -> tuple[LayerDescription, ...]:
        describe_layer = late_module("vitpar.models.trace").describe_layer
        if self.depth > MAX_BLOCKS:
            raise ModelError(f"{self.name} has {self.depth:,} blocks: use at most {MAX_BLOCKS:,}")
        layers: list[LayerDescription] = []
        kinds: dict[tuple[object, ...], str] = {}
        for name in self.layer_names:
            layer = describe_layer(self, name, layers[-1].gives if layers else None, saved=True)
            key = layer.takes, layer.gives, layer.parts, layer.modes, layer.other_flops
            kind = kinds.setdefault(key, f"block{len(kinds) + 1}") if layer.is_block else name
            layers.append(dataclasses.replace(layer, kind=kind))
        if len(kinds) == 1:
            layers[1:-1] = [dataclasses.replace(layer, kind="block") for layer in layers[1:-1]]
        return tuple(layers)


def load(text: str) -> str:
    """Run the file of ``FILE.py:NAME`` and register the configuration class NAME in it. Return `text`.

    The family's name has no folder, so that a run can be resumed from another place.

    Raises ModelError if the file cannot be run or has no such class.
    """
    family, name = load_class(text, ModelConfig, "model", ModelError, "OwnModel")
    register(family, name)
    return text


def register(model: type[ModelConfig], name: str | None = None) -> str:
    """Make a configuration class known by `name`, for recipes, weights and checkpoints, and return the name.

    name: None for that of the class.

    Raises ModelError for the name of one of vitpar's families.
    """
    name = name or model.__name__
    if name in FAMILIES and not issubclass(FAMILIES[name], OwnModel):
        raise ModelError(f"there is a family called {name} already: give the model another name")
    model.FAMILY = name
    FAMILIES[name] = model
    return name
