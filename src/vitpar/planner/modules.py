"""Tensor-parallel plan of each kind of layer, module by module, in words: what ``parallelize_module`` applies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitpar.models.config import ModelConfig
from vitpar.models.description import Part
from vitpar.models.roles import AXES, TABLE, UNSPLIT, Message
from vitpar.strategy import Plan, Strategy


def layer_modules(config: ModelConfig, plan: Plan) -> list[dict[str, Any]]:
    """Return the plans of all layers with tensor parallelism, in the order of layers, as `vitpar plan --json` does.

    A record has the names of layers of one kind under one strategy, and a row for each of their modules: its role
    (``vitpar.models.roles``) and style (``vitpar.parallel.styles``), the placements of its weight and bias, and the
    collectives before and after its product, in forward / in backward; empty for what it does not have.
    """
    layers: dict[tuple[str, Strategy], list[str]] = {}
    for name, strategy in plan.strategies(config.layer_names).items():
        if strategy.degree("tp") > 1:
            layers.setdefault((config.layers[name].kind, strategy), []).append(name)
    return [
        {
            "layers": names,
            "strategy": str(strategy),
            "modules": [_summary(part, strategy.mode) for part in config.layers[names[0]].parts],
        }
        for (_, strategy), names in layers.items()
    ]


def _summary(part: Part, mode: str) -> dict[str, str]:
    role = TABLE[mode].get(part.role, UNSPLIT)
    return {
        "module": part.name,
        "role": part.role,
        "style": role.style,
        "weight": _placement(role.weight, mode) if {"weight", ""} & part.shapes.keys() else "",
        "bias": _placement(role.bias, mode) if "bias" in part.shapes else "",
        "before": _exchange(role.before, mode),
        "after": ", then ".join(filter(None, (_exchange(role.gathered, mode), _exchange(role.after, mode)))),
    }


def _placement(dims: Mapping[str, int], mode: str) -> str:
    """Return torch's placement on each axis of a mode. Several axes have their names."""
    placed = {axis: f"Shard({dims[axis]})" if axis in dims else "Replicate" for axis in AXES[mode]}
    return ", ".join(words if len(placed) == 1 else f"{axis} {words}" for axis, words in placed.items())


def _exchange(message: Message | None, mode: str) -> str:
    if message is None:
        return ""
    return message.exchange.words + (f" over {message.axis}" if len(AXES[mode]) > 1 else "")
