"""Tensors of other libraries' models, made of vitpar's parameters: what the exports of all families have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from einops import rearrange
from torch import Tensor

from vitpar.errors import DataError
from vitpar.models.config import ModelConfig
from vitpar.models.foreign import ExportedTensor

Tensors = dict[str, ExportedTensor]
"""Tensors by foreign name."""


def refuse(config: ModelConfig, library: str, parts: Mapping[str, bool]) -> None:
    """Raise DataError if the model has one of `parts`, which models of `library` do not have."""
    if there := [part for part, has in parts.items() if has]:
        raise DataError(f"{config.name} has {', '.join(there)}, which no model of {library} has: use --format vitpar")


def alone(name: str) -> ExportedTensor:
    """Return a tensor that is a parameter of vitpar as it is."""
    return ExportedTensor((name,))


def linear(theirs: str, ours: str, *, bias: bool = True) -> Tensors:
    """Return weight and bias of a linear layer or norm that is the same in vitpar."""
    return {f"{theirs}.{end}": alone(f"{ours}.{end}") for end in ("weight", *(["bias"] if bias else []))}


def patches(name: str, channels: int, patch_size: int) -> Tensors:
    """Return the convolution that projects patches."""

    def folded(weight: Tensor) -> Tensor:
        return rearrange(weight, "d (c p q) -> d c p q", c=channels, p=patch_size)

    ours = "embed.patch_embed.proj"
    return {f"{name}.weight": ExportedTensor((f"{ours}.weight",), folded), f"{name}.bias": alone(f"{ours}.bias")}


def rows(heads: int, parts: int, number: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return the function that orders rows (head, part, feature) as (part, head, feature).

    number: part to take; None for all.
    """

    def ordered(tensor: Tensor) -> Tensor:
        apart = rearrange(tensor, "(h n d) ... -> n (h d) ...", h=heads, n=parts)
        return apart.flatten(0, 1) if number is None else apart[number]

    return ordered


def classifier(*names: str) -> Tensors:
    """Return the classifiers: that of the class token or mean, and that of the distillation token."""
    return {
        f"{theirs}.{end}": alone(f"head.{ours}.{end}")
        for theirs, ours in zip(names, ("fc", "fc_dist"), strict=False)
        for end in ("weight", "bias")
    }
