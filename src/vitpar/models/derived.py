"""Configurations that are made of another one: some of its blocks, or the same model with frozen parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from vitpar.models.config import ModelConfig, Rule, Rules
from vitpar.models.description import InputSpec, LayerDescription, SideInput, backwards, block_index, block_name

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Derived(ModelConfig):
    """Base: all that is not redefined is that of the other model."""

    whole: ModelConfig
    """The other model."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.whole.name

    @property
    def image_size(self) -> int:  # type: ignore[override]
        return self.whole.image_size

    @property
    def channels(self) -> int:  # type: ignore[override]
        return self.whole.channels

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        return self.whole.num_classes

    @property
    def input(self) -> InputSpec:
        return self.whole.input

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.whole.output_shape

    @property
    def side_inputs(self) -> Mapping[str, SideInput]:
        return self.whole.side_inputs

    @property
    def shared(self) -> Mapping[str, str]:
        return self.whole.shared

    @property
    def stochastic(self) -> bool:
        return self.whole.stochastic

    @property
    def num_blocks(self) -> int:
        return self.whole.num_blocks

    def build_layer(self, name: str) -> nn.Module:
        return self.whole.build_layer(name)

    def initial_rules(self) -> Rules:
        # Rules read fields of the family's configuration, which this one does not have.
        def of_whole(rule: Rule) -> Rule:
            return functools.wraps(rule)(lambda v, shape, _, *place: rule(v, shape, self.whole, *place))

        return tuple((pattern, of_whole(rule)) for pattern, rule in self.whole.initial_rules())


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
        parts = {
            name: frozenset(one for one in layer.parameters if f"{name}.{one}" in self.frozen)
            for name, layer in self.whole.layers.items()
        }
        computed = backwards(self.whole.layer_names, frozen_layers(self.whole, self.frozen))
        gradients, named = [], []
        for name, layer in self.whole.layers.items():
            backward, kind = computed[name], layer.kind
            if backward == "weights" and layer.first:
                backward = "all"  # the input of the first layer has no gradient in any training
            if backward != "all":
                kind = f"{kind}, backward {backward}"
            if parts[name] and len(parts[name]) < len(layer.parameters):
                kind = f"{kind}, {len(parts[name])} of {len(layer.parameters)} parameters frozen"
            gradients.append(backward)
            named.append((kind, parts[name]))
        return tuple(
            dataclasses.replace(layer, kind=kind, backward=backward, frozen=parts[layer.name])
            for layer, kind, backward in zip(self.whole.layers.values(), kind_names(named), gradients, strict=True)
        )

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


def frozen_layers(config: ModelConfig, frozen: Collection[str]) -> frozenset[str]:
    """Return the names of the layers without a trained parameter.

    frozen: names of the parameters that are not trained.
    """
    return frozenset(
        name
        for name, layer in config.layers.items()
        if frozen and all(f"{name}.{one}" in frozen for one in layer.parameters)
    )


def with_frozen(config: ModelConfig, frozen: frozenset[str]) -> ModelConfig:
    """Return `config` for planning a training in which the parameters called `frozen` are not trained."""
    return PartlyFrozen(config, frozen) if frozen else config
