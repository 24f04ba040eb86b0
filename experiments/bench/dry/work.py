"""Work of a compiled block: the kernels of its forward and backward, with bytes, FLOPs and shapes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

VARIANTS = ("plain", "drop_path", "dropout", "packed", "fp8")
"""Variants of a block: in bf16 plain, with drop-path, with dropout or with packed attention, and in fp8."""
Kind = Literal["product", "attention", "triton", "small"]
"""Kind of a kernel: a matrix product of cuBLAS, attention, a kernel that the compiler generates, or one of ATen."""


@dataclass(frozen=True)
class Resources:
    """Registers and memory of one configuration of a Triton kernel, as ptxas reports them."""

    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes of registers that a thread stores in memory and loads again."""
    shared: int
    """Bytes of shared memory of a block of threads."""
    warps: int
    """Warps of a block of threads."""


@dataclass(frozen=True)
class Launch:
    """Start of a kernel."""

    kind: Kind
    """Kind of the kernel."""
    name: str
    """Name of the operation or of the Triton kernel."""
    bytes: int
    """Bytes read and written, each tensor once."""
    flops: int = 0
    """FLOPs of a product or of attention."""
    shape: tuple[int, ...] = ()
    """Rows, columns and summed elements of a product; batch, heads, tokens and features of attention."""
    dtype: str = "bfloat16"
    """Data type of the operands of a product."""
    widest: int = 0
    """Bytes of the largest operand or output of a product."""


@dataclass(frozen=True)
class Graph:
    """Forward or backward of a block."""

    backward: bool
    """Whether it is the backward."""
    launches: tuple[Launch, ...]
    """Kernels in the order of their start."""
    saved: int = 0
    """Bytes of activations that forward keeps for backward, with the block's input."""


@dataclass(frozen=True)
class BlockWork:
    """Forward and backward of one block of a model."""

    graphs: tuple[Graph, Graph]
    """Forward, then backward."""
    activation: int
    """Bytes of an activation of tokens x width."""
    resources: dict[str, tuple[Resources, ...]] = field(default_factory=dict)
    """Resources of each Triton kernel by name, one for each configuration that may run."""

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Kernels of forward and backward."""
        return tuple(launch for graph in self.graphs for launch in graph.launches)

    @property
    def saved(self) -> int:
        """Bytes of activations kept for backward."""
        return self.graphs[0].saved

    @property
    def moved(self) -> int:
        """Bytes that kernels other than products and attention read and write."""
        return moved(self.launches)

    @property
    def passes(self) -> float:
        """Passes over an activation of tokens x width that `moved` bytes are."""
        return self.moved / self.activation

    @property
    def spilling(self) -> tuple[str, ...]:
        """Triton kernels of which every configuration spills registers."""
        return tuple(name for name, found in self.resources.items() if found and all(one.spills for one in found))


def moved(launches: Iterable[Launch]) -> int:
    """Return the bytes that kernels other than products and attention read and write."""
    return sum(launch.bytes for launch in launches if launch.kind in ("triton", "small"))
