"""Configurations that are made of another one: some of its blocks, or the same model with frozen layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from vitpar.models.config import ModelConfig, Rule, Rules
from vitpar.models.description import InputSpec, LayerDescription, SideInput, backwards, block_index, block_name

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class _Derived(ModelConfig):
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

    def build_layer(self, name: str) -> nn.Module:
        return self.whole.build_layer(name)

    def initial_rules(self) -> Rules:
        # Rules read fields of the family's configuration, which this one does not have.
        def of_whole(rule: Rule) -> Rule:
            return functools.wraps(rule)(lambda v, shape, _, *place: rule(v, shape, self.whole, *place))

        return tuple((pattern, of_whole(rule)) for pattern, rule in self.whole.initial_rules())


@dataclass(frozen=True)
class Excerpt(_Derived):
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

    def build_layer(self, name: str) -> nn.Module:
        return self.whole.build_layer(self.excerpted[block_index(name)] if self.layers[name].is_block else name)


@dataclass(frozen=True)
class PartlyFrozen(_Derived):
    """A model with frozen layers, whose descriptions say what their backward computes: to plan a training.

    A kind of layers becomes one kind for each amount of backward.
    """

    FAMILY: ClassVar[str] = "partly frozen"

    frozen: frozenset[str]
    """Names of the layers that are not trained."""

    def describe(self) -> tuple[LayerDescription, ...]:
        computed = backwards(self.whole.layer_names, self.frozen)
        # The input of the first layer has no gradient in any training.
        usual = {
            name
            for name, gradients in computed.items()
            if gradients == "all" or (self.whole.layers[name].first and gradients == "weights")
        }
        return tuple(
            layer
            if name in usual
            else dataclasses.replace(layer, kind=f"{layer.kind}, backward {computed[name]}", backward=computed[name])
            for name, layer in self.whole.layers.items()
        )

    @property
    def layer_flops(self) -> dict[str, int]:
        # Pipelines balance stages by those of the complete model.
        return self.whole.layer_flops

    @cached_property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers.values())


def with_frozen(config: ModelConfig, frozen: frozenset[str]) -> ModelConfig:
    """Return `config` for planning a training in which the layers called `frozen` are not trained."""
    return PartlyFrozen(config, frozen) if frozen else config
