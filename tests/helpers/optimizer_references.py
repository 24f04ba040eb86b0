"""LAMB, LARS and Muon from the papers' formulas, and torch's Adafactor, on unsharded parameters in one process."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from helpers.sharded_parameters import HEAD_DIM, HEADS, SHAPES, drawn, layers_above
from vitpar.training.optim.optimizer import decays
from vitpar.training.recipe.sections import OptimizerSection

RATES = (0.1, 0.03, 0.2, 0.05)

ADAM = {"name": "adam", "betas": (0.8, 0.9), "eps": 1e-6}
LION = {"name": "lion", "betas": (0.8, 0.9)}
LAMB = {"name": "lamb", "betas": (0.8, 0.9), "eps": 1e-6}
LARS = {"name": "lars", "momentum": 0.7, "trust_coefficient": 0.5}
ADAFACTOR = {"name": "adafactor"}
MUON = {"name": "muon", "betas": (0.8, 0.9), "momentum": 0.9}
VARIANTS: tuple[dict[str, Any], ...] = (
    {**LARS, "nesterov": True},
    {**LARS, "momentum": 0.0},
    {**MUON, "nesterov": False},
    {**MUON, "adjust_lr_fn": "original"},
    {**MUON, "ns_steps": 2},
)


def shown(settings: dict[str, Any] | str) -> str:
    if isinstance(settings, str):
        return settings
    return " ".join(f"{key}={value}" for key, value in settings.items() if key not in ("betas", "eps"))


def section(settings: Mapping[str, Any]) -> OptimizerSection:
    return OptimizerSection(**{"weight_decay": 0.3, **settings})


def reference(settings: dict[str, Any], rates: tuple[float, ...] = RATES) -> dict[str, Tensor]:
    """Return all parameters after one step per rate in `rates`."""
    chosen = section(settings)
    parameters = {name: drawn("value", name) for name in SHAPES}
    if chosen.name == "adafactor":
        return adafactor(parameters, chosen, rates)
    for name, x in parameters.items():
        memory: dict[str, Tensor] = {"m": torch.zeros_like(x), "v": torch.zeros_like(x)}
        decay = chosen.weight_decay if decays(x) else 0.0
        for t, peak in enumerate(rates, start=1):
            rate = peak * chosen.layer_decay ** layers_above(name)
            gradient = drawn(str(t), name)
            if chosen.name == "lamb":
                step = adam(memory, gradient, t, chosen) + decay * x
                ratio = x.norm() / step.norm() if decays(x) else 1.0
                x -= rate * ratio * step
            elif chosen.name == "lars":
                norms = x.norm(), gradient.norm()
                ratio = chosen.trust_coefficient * norms[0] / (norms[1] + decay * norms[0]) if decays(x) else 1.0
                scaled = ratio * (gradient + decay * x)
                memory["m"] = chosen.momentum * memory["m"] + scaled
                x -= rate * (scaled + chosen.momentum * memory["m"] if chosen.nesterov else memory["m"])
            elif not (name.startswith("blocks.") and x.dim() == 2):
                step = adam(memory, gradient, t, chosen) + decay * x
                x -= rate * step
            else:
                mu = chosen.momentum
                memory["m"] = mu * memory["m"] + (1 - mu) * gradient
                step = mu * memory["m"] + (1 - mu) * gradient if chosen.nesterov else memory["m"]
                x *= 1 - rate * decay
                for rows in rows_of_maps(name):
                    original = max(1.0, len(rows) / x.shape[1]) ** 0.5
                    factor = original if chosen.adjust_lr_fn == "original" else 0.2 * max(len(rows), x.shape[1]) ** 0.5
                    x[rows] -= rate * factor * orthogonal(step[rows], chosen.ns_steps)
    return parameters


def adafactor(parameters: dict[str, Tensor], settings: OptimizerSection, rates: tuple[float, ...]) -> dict[str, Tensor]:
    """Update `parameters` in place by torch.optim.Adafactor, and return them."""
    groups = [{"params": [x], "weight_decay": settings.weight_decay * decays(x)} for x in parameters.values()]
    torchs = torch.optim.Adafactor(groups, foreach=False)
    for t, peak in enumerate(rates, start=1):
        for group, (name, x) in zip(torchs.param_groups, parameters.items(), strict=True):
            group["lr"] = peak * settings.layer_decay ** layers_above(name)
            x.grad = drawn(str(t), name)
        torchs.step()
    return parameters


def adam(memory: dict[str, Tensor], gradient: Tensor, t: int, settings: OptimizerSection) -> Tensor:
    one, two = settings.betas
    memory["m"] = one * memory["m"] + (1 - one) * gradient
    memory["v"] = two * memory["v"] + (1 - two) * gradient**2
    return (memory["m"] / (1 - one**t)) / ((memory["v"] / (1 - two**t)).sqrt() + settings.eps)


def rows_of_maps(name: str) -> list[list[int]]:
    """Return the rows of each linear map in a matrix. qkv holds three, interleaved by head."""
    if not name.endswith("qkv.weight"):
        return [list(range(SHAPES[name][0]))]
    heads = [3 * HEAD_DIM * head for head in range(HEADS)]
    return [[start + HEAD_DIM * part + i for start in heads for i in range(HEAD_DIM)] for part in range(3)]


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Return the Newton-Schulz result, computed exactly: the polynomial is applied to the singular values of an SVD."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v
