"""Tensor-parallel plan of each kind of layer, module by module, in words: what ``parallelize_module`` applies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription, Part
from vitpar.models.roles import AXES, TABLE, UNSPLIT, Message
from vitpar.strategy import Plan, Strategy


@dataclass(frozen=True)
class ModuleSummary:
    """Row of the plan of a layer."""

    module: str
    """Name of the module or parameter in the layer."""
    role: str
    """Its role (``vitpar.models.roles``)."""
    style: str
    """Name of its style (``vitpar.parallel.styles``)."""
    weight: str
    """Placement of its weight; empty without one."""
    bias: str
    """Placement of its bias; empty without one."""
    before: str
    """Collectives before its product, in forward / in backward; empty for none."""
    after: str
    """Collectives after its product, likewise."""


@dataclass(frozen=True)
class LayerModules:
    """Plan of the layers of one kind under one strategy."""

    layers: tuple[str, ...]
    """Names of the layers."""
    strategy: str
    """Canonical string of the strategy."""
    modules: tuple[ModuleSummary, ...]
    """Its modules, in order."""


def layer_modules(config: ModelConfig, plan: Plan) -> list[LayerModules]:
    """Return the plans of all layers with tensor parallelism, in the order of layers."""
    layers: dict[tuple[str, Strategy], list[str]] = {}
    for name, strategy in plan.strategies(config.layer_names).items():
        if strategy.degree("tp") > 1:
            layers.setdefault((config.layers[name].kind, strategy), []).append(name)
    return [
        LayerModules(tuple(names), str(strategy), module_summaries(config.layers[names[0]], strategy.mode))
        for (_, strategy), names in layers.items()
    ]


def module_summaries(layer: LayerDescription, mode: str) -> tuple[ModuleSummary, ...]:
    """Return the plan of a layer under a tensor-parallel mode."""
    return tuple(_summary(part, mode) for part in layer.parts)


def _summary(part: Part, mode: str) -> ModuleSummary:
    role = TABLE[mode].get(part.role, UNSPLIT)
    return ModuleSummary(
        module=part.name,
        role=part.role,
        style=role.style,
        weight=_placement(role.weight, mode) if {"weight", ""} & part.shapes.keys() else "",
        bias=_placement(role.bias, mode) if "bias" in part.shapes else "",
        before=_exchange(role.before, mode),
        after=", then ".join(filter(None, (_exchange(role.gathered, mode), _exchange(role.after, mode)))),
    )


def _placement(dims: Mapping[str, int], mode: str) -> str:
    """Return torch's placement on each axis of a mode. Several axes have their names."""
    placed = {axis: f"Shard({dims[axis]})" if axis in dims else "Replicate" for axis in AXES[mode]}
    return ", ".join(words if len(placed) == 1 else f"{axis} {words}" for axis, words in placed.items())


def _exchange(message: Message | None, mode: str) -> str:
    if message is None:
        return ""
    return message.exchange.words + (f" over {message.axis}" if len(AXES[mode]) > 1 else "")
