"""Configurations that are made of another one: some of its blocks, or the same model with frozen parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, TypeVar

from vitpar.models.config import ModelConfig, Rule, Rules
from vitpar.models.description import Backward, LayerDescription, block_index, block_name

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")


def of_whole(*names: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of a class, which gives it these properties and methods of the other model."""

    def decorated(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, property(attrgetter(f"whole.{name}")))
        return cls

    return decorated


@of_whole("name", "image_size", "channels", "num_classes", "input", "output_shape")
@of_whole("side_inputs", "shared", "stochastic", "num_blocks", "build_layer")
@dataclass(frozen=True)
class Derived(ModelConfig):
    """Base: all that is not redefined is that of the other model."""

    whole: ModelConfig
    """The other model."""

    def initial_rules(self) -> Rules:
        # Rules read fields of the family's configuration, which this one does not have.
        def for_whole(rule: Rule) -> Rule:
            return functools.wraps(rule)(lambda v, shape, _, *place: rule(v, shape, self.whole, *place))

        return tuple((pattern, for_whole(rule)) for pattern, rule in self.whole.initial_rules())


@dataclass(frozen=True)
class Excerpt(Derived):
    """A model of some of another's blocks, in order, with its embed and head: to measure its kinds of layers.

    Neighbours need not fit each other, so that only its single layers can run. They share nothing.
    """

    FAMILY: ClassVar[str] = "excerpt"

    excerpted: tuple[str, ...]
    """Names of the blocks in the other model."""

    def describe(self) -> tuple[LayerDescription, ...]:
        layers, (first, *_, last) = self.whole.layers, self.whole.layer_names
        blocks = (
            dataclasses.replace(layers[name], name=block_name(index), group=None)
            for index, name in enumerate(self.excerpted)
        )
        return layers[first], *blocks, layers[last]

    @property
    def shared(self) -> Mapping[str, str]:
        return {}

    @property
    def num_blocks(self) -> int:
        return len(self.excerpted)

    def build_layer(self, name: str) -> nn.Module:
        return self.whole.build_layer(self.excerpted[block_index(name)] if self.layers[name].is_block else name)


@dataclass(frozen=True)
class PartlyFrozen(Derived):
    """A model with frozen parameters, whose descriptions say what their backward computes: to plan a training.

    A kind of layers becomes one kind for each amount of backward and each set of frozen parameters.
    """

    FAMILY: ClassVar[str] = "partly frozen"

    frozen: frozenset[str]
    """Names of the parameters that are not trained."""

    def describe(self) -> tuple[LayerDescription, ...]:
        # Backward ends at the lowest trained layer, whose input needs no gradient.
        reached, made, named = False, list[LayerDescription](), []
        for name, layer in self.whole.layers.items():
            frozen, kind = frozenset(one for one in layer.parameters if f"{name}.{one}" in self.frozen), layer.kind
            backward: Backward = "inputs" if reached else "nothing"
            if len(frozen) < len(layer.parameters):
                backward = "all" if reached or layer.first else "weights"  # the first layer's input never has one
                reached = True
            if backward != "all":
                kind = f"{kind}, backward {backward}"
            if 0 < len(frozen) < len(layer.parameters):
                kind = f"{kind}, {len(frozen)} of {len(layer.parameters)} parameters frozen"
            made.append(dataclasses.replace(layer, backward=backward, frozen=frozen))
            named.append((kind, frozen))
        return tuple(dataclasses.replace(layer, kind=kind) for layer, kind in zip(made, kind_names(named), strict=True))

    @property
    def layer_flops(self) -> dict[str, int]:
        # Pipelines balance stages by those of the complete model.
        return self.whole.layer_flops

    @cached_property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers.values())


def kind_names(kinds: Iterable[tuple[str, Hashable]]) -> list[str]:
    """Return a name for each pair of a kind and what its layers differ in: the kind's, and a number behind others."""
    known: dict[str, list[Hashable]] = {}
    names = []
    for kind, variant in kinds:
        variants = known.setdefault(kind, [])
        if variant not in variants:
            variants.append(variant)
        number = variants.index(variant)
        names.append(f"{kind} ({number + 1})" if number else kind)
    return names


def with_frozen(config: ModelConfig, frozen: frozenset[str]) -> ModelConfig:
    """Return `config` for planning a training in which the parameters called `frozen` are not trained."""
    return PartlyFrozen(config, frozen) if frozen else config
