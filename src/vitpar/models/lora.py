"""Configuration of a model with low-rank adapters (LoRA, arXiv 2106.09685) on some of its linear layers.

An adapted layer gives ``W x + b + alpha / rank · B (A x)``. Its adapter is two linear layers without bias inside it,
`lora_A` [rank, in] and `lora_B` [out, rank], so that the names of all other parameters stay. They are parts of the
layer's description with roles of their own (``vitpar.models.roles``): plans split them, prices count them, and
checkpoints hold them as anything else. `B` begins as zeros, so that training begins with the model as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from vitpar.errors import ModelError
from vitpar.limits import MAX_MEASURE, MAX_WIDTH
from vitpar.models.config import ModelConfig, Rules, late_module
from vitpar.models.derived import Derived, kind_names, of_whole
from vitpar.models.description import ADAPTERS, LayerDescription, Part, layer_of
from vitpar.text import nearest, shown

if TYPE_CHECKING:
    from torch import nn

ROLES = {"column": ("column_a", "column_b"), "row": ("row_a", "row_b"), "other": ("other", "other")}
"""Roles of A and B by the role of the adapted linear layer. Layers of other roles have no adapters."""
A, B = ADAPTERS


@of_whole("FAMILY", "TASK", "CALIBRATED", "large", "layers_above", "rate_part", "clip_part", "extra_passes")
@of_whole("hidden_matrices")
@dataclass(frozen=True)
class LoRA(Derived):
    """A model with adapters. Everything else is the model's.

    Muon does not get adapters: it makes the singular values of an update equal, which is meant for complete matrices.
    """

    modules: tuple[str, ...]
    """Names of the adapted linear layers in the model, such as blocks.0.attn.qkv."""
    rank: int
    """Features between A and B."""
    alpha: float
    """Numerator of the factor of an adapter, whose denominator is `rank`."""
    init: Literal["lora", "perturbed"] = "lora"
    """Initial values of B: zeros, or for comparing plans numbers that leave no gradient zero."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_WIDTH:
            raise ModelError(f"the rank of adapters is {shown(self.rank)}: it must be from 1 to {MAX_WIDTH:,}")
        if not 0 < self.alpha <= MAX_MEASURE:
            raise ModelError(f"alpha of adapters is {shown(self.alpha)}: it must be above 0")
        able = {name for name, part in linear_layers(self.whole) if part.role in ROLES}
        if unknown := next((name for name in self.modules if name not in able), None):
            raise ModelError(
                f"{self.name} has no linear layer '{shown(unknown)}' that can be adapted: use other targets"
            )

    def __getattr__(self, name: str) -> Any:
        # Fields of the family, such as drop_path. Not those of pickle, which asks before `whole` is there.
        if name.startswith("_") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)

    @property
    def unadapted(self) -> ModelConfig:
        return self.whole

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank

    @property
    def perturbed(self) -> Self:
        return dataclasses.replace(self, whole=self.whole.perturbed, init="perturbed")

    def resized(self, image_size: int) -> Self | None:
        whole = self.whole.resized(image_size)
        return None if whole is None else dataclasses.replace(self, whole=whole)

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters' parameters."""
        return frozenset(f"{name}{end}.weight" for name in self.modules for end in (A, B))

    def describe(self) -> tuple[LayerDescription, ...]:
        layers, inside = tuple(self.whole.layers.values()), self.by_layer
        adapted = [inside.get(layer.name, ()) for layer in layers]
        kinds = kind_names(
            (f"{layer.kind}, rank {self.rank}" if names else layer.kind, names)
            for layer, names in zip(layers, adapted, strict=True)
        )
        described = []
        for layer, names, kind in zip(layers, adapted, kinds, strict=True):
            parts, kept = list[Part](), 0  # A's output is kept for backward, and scaled
            for part in layer.parts:
                parts.append(part)
                if part.name in names and part.product is not None:
                    (takes, gives), (first, second) = part.product, ROLES[part.role]
                    parts.append(Part(f"{part.name}{A}", first, {"weight": (self.rank, takes)}, part.tokens))
                    parts.append(Part(f"{part.name}{B}", second, {"weight": (gives, self.rank)}, part.tokens))
                    kept += 2 * self.rank * part.tokens
            saved = None if layer.saved is None else layer.saved + kept
            described.append(dataclasses.replace(layer, kind=kind, parts=tuple(parts), saved=saved))
        return tuple(described)

    @cached_property
    def by_layer(self) -> dict[str, tuple[str, ...]]:
        """Names of the adapted linear layers in each layer that has any, by its name."""
        inside: dict[str, tuple[str, ...]] = {}
        for name in self.modules:
            layer = layer_of(name)
            inside[layer] = (*inside.get(layer, ()), name.removeprefix(f"{layer}."))
        return inside

    def build_layer(self, name: str) -> nn.Module:
        layer = self.whole.build_layer(name)
        late_module("vitpar.models.lora_layers").adapt(layer, self.by_layer.get(name, ()), self.rank, self.scale)
        return layer

    def initial_rules(self) -> Rules:
        rules: dict[str, Rules] = late_module("vitpar.models.lora_layers").RULES
        return *rules[self.init], *super().initial_rules()


def adapters_of(config: ModelConfig) -> frozenset[str]:
    """Return the names of the parameters of adapters in a model, which may have none."""
    return config.adapters if isinstance(config, LoRA) else frozenset()


def linear_layers(config: ModelConfig) -> list[tuple[str, Part]]:
    """Return the linear layers of a model that are modules which compute tokens, by their names in the model."""
    return [
        (f"{layer.name}.{part.name}", part)
        for layer in config.layers.values()
        for part in layer.parts
        if part.product and part.tokens
    ]


def adapted(config: ModelConfig, rank: int, alpha: float, targets: Sequence[str] | None = None) -> LoRA:
    """Return `config` with adapters.

    targets: patterns of the names of linear layers, complete ones or ends such as qkv; None for the linear layers of
        attention and MLP in all blocks.

    Raises ModelError for a target that names none, or a layer that cannot be adapted.
    """
    every = linear_layers(config)
    if targets is None:
        pairs = {
            name for name, part in every if part.role in ("column", "row") and config.layers[layer_of(name)].is_block
        }
        if not pairs:
            raise ModelError(f"{config.name} names no linear layers of attention or MLP: name some in lora.targets")
        return LoRA(config, tuple(name for name, _ in every if name in pairs), rank, alpha)
    chosen = set[str]()
    for target in targets:
        named = {name: part for name, part in every if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")}
        able = {name for name, part in named.items() if part.role in ROLES}
        if not named:
            ends = {part.name.rpartition(".")[2] for _, part in every}
            raise ModelError(
                f"lora.targets: '{shown(target)}' names no linear layer of {config.name}{nearest(target, ends)}: use a "
                f"pattern of names such as {every[0][0] if every else 'fc1'}"
            )
        if not able:
            name, part = next(iter(named.items()))
            raise ModelError(
                f"lora.targets: {name} of {config.name} is a linear layer with the role {part.role}, which cannot be "
                f"adapted: leave '{shown(target)}' out, or train it with lora.train"
            )
        chosen |= able
    return LoRA(config, tuple(name for name, _ in every if name in chosen), rank, alpha)
