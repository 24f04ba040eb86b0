"""Queries, keys and values and MLPs of other libraries' Vision Transformers, made of vitpar's parameters."""

from __future__ import annotations

from vitpar.models.exporting import Tensors, alone, linear, rows
from vitpar.models.foreign import ExportedTensor
from vitpar.models.vit.config import ViTConfig


def queries(c: ViTConfig, start: str, names: tuple[str, ...], ours: str) -> Tensors:
    """Return the tensors of queries, keys and values: of one linear layer if there is one name, else of three."""
    ends = ("weight", *(["bias"] if c.qkv_bias == "all" else []))
    numbers = [None] if len(names) == 1 else [0, 1, 2]
    tensors = {
        f"{start}.{name}.{end}": ExportedTensor((f"{ours}.qkv.{end}",), rows(c.num_heads, 3, number))
        for name, number in zip(names, numbers, strict=True)
        for end in ends
    }
    if c.qkv_bias == "qv":
        biases = ("q_bias", "v_bias") if len(names) == 1 else (f"{names[0]}.bias", f"{names[2]}.bias")
        tensors |= {f"{start}.{bias}": alone(f"{ours}.{which}_bias") for bias, which in zip(biases, "qv", strict=True)}
    return tensors


def mlp(c: ViTConfig, start: str, names: tuple[str, ...], ours: str) -> Tensors:
    """Return the tensors of an MLP.

    names: of its layers: (first, second), or (gates, values, second).
    """
    if c.gates == 1:
        return linear(f"{start}.{names[0]}", f"{ours}.fc1") | linear(f"{start}.{names[-1]}", f"{ours}.fc2")
    numbers = [0, 1] if len(names) == 3 else [None]
    first = {
        f"{start}.{name}.{end}": ExportedTensor((f"{ours}.fc1.{end}",), rows(c.mlp_hidden_dim, 2, number))
        for name, number in zip(names[:-1], numbers, strict=True)
        for end in ("weight", "bias")
    }
    return first | linear(f"{start}.{names[-1]}", f"{ours}.fc2")
