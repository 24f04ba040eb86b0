"""Sections of a model: neighbouring blocks that may have a strategy of their own, such as the stages of a Swin.

A model whose blocks are alike has one section with all its layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from vitpar.errors import StrategyError
from vitpar.models.config import ModelConfig
from vitpar.models.description import LayerDescription
from vitpar.strategy import Axis, Strategy
from vitpar.strategy.layer import Role
from vitpar.strategy.validate import unsplittable

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BlockSection:
    """Neighbouring blocks of one group, with embed in front of the first section and the head behind the last."""

    blocks: range
    """Numbers of its blocks."""
    layers: tuple[LayerDescription, ...]
    """The first layer of each kind in it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of its layers."""
        return tuple(layer.kind for layer in self.layers)

    def fits(self, strategy: Strategy) -> bool:
        """Return whether `strategy` can split every layer of the section."""
        return _fits(self, strategy.degree("tp"), strategy.tensor_mode, strategy.depth, strategy.sequence_parallel)


@lru_cache(maxsize=4096)
def _fits(section: BlockSection, tp: int, mode: str, depth: int | None, sequence_parallel: bool) -> bool:
    """Return what `BlockSection.fits` returns: only these properties of a strategy decide it."""
    axes = (Axis("tp", tp),) if tp > 1 else ()
    strategy = Strategy(axes, mode, depth, sequence_parallel)
    return not any(unsplittable(layer, strategy) for layer in section.layers)


@dataclass(frozen=True, eq=False)
class Sections:
    """The sections of a model and the kinds of its layers, as rows of arrays by kind."""

    sections: tuple[BlockSection, ...]
    """Sections in order."""
    kinds: tuple[str, ...]
    """Kinds of layers, in the order of the rows of arrays."""
    rows: tuple[int, ...]
    """Row of each block's kind."""
    takes: tuple[int, ...]
    """Elements of the activation of one image that each block and the head take."""

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.rows)

    @property
    def alike(self) -> bool:
        """Whether all blocks are of one kind."""
        return len(set(self.rows)) == 1

    @cached_property
    def counts(self) -> Array:
        """Number of layers of each kind."""
        return np.bincount([0, *self.rows, len(self.kinds) - 1]).astype(float)

    @cached_property
    def of_block(self) -> tuple[int, ...]:
        """BlockSection of each block."""
        return tuple(number for number, section in enumerate(self.sections) for _ in section.blocks)

    def stage_counts(self, sizes: Sequence[int]) -> Array:
        """Return the number of layers of each kind in each stage, an array [stages, kinds].

        sizes: number of blocks of each stage
        """
        counts, start = np.zeros((len(sizes), len(self.kinds))), 0
        for stage, size in enumerate(sizes):
            np.add.at(counts[stage], list(self.rows[start : start + size]), 1)
            start += size
        counts[0, 0] += 1
        counts[-1, -1] += 1
        return counts

    def least_share(self, sizes: Sequence[int], works: Sequence[float]) -> float:
        """Return the least share of all blocks' work that a stage has.

        sizes: number of blocks of each stage
        works: work of one layer by kind; that of embed and head does not count
        """
        if self.alike:
            return min(sizes) / self.depth
        if not 0 < sum(works) < float("inf"):
            return 0.0
        stages = self.stage_counts(sizes) @ np.array([0.0, *works[1:-1], 0.0])
        return float(stages.min() / stages.sum())


def sections_of(config: ModelConfig) -> Sections:
    """Return the sections of a model: one for each run of blocks of the same group, or of the same kind without groups.

    Blocks of one kind make one section, whatever their groups.
    """
    layers, kinds = tuple(config.layers.values()), tuple(config.kinds)
    blocks = layers[1:-1]
    alike = len(config.block_kinds) == 1
    starts = [
        number
        for number, block in enumerate(blocks)
        if number == 0
        or (not alike and (block.group or block.kind) != (blocks[number - 1].group or blocks[number - 1].kind))
    ]
    sections = []
    for first, stop in zip(starts, [*starts[1:], len(blocks)], strict=True):
        inside = layers[first + (first > 0) : stop + 1 + (stop == len(blocks))]
        sections.append(
            BlockSection(range(first, stop), tuple({layer.kind: layer for layer in reversed(inside)}.values())[::-1])
        )
    rows = tuple(kinds.index(block.kind) for block in blocks)
    takes = tuple(layer.takes.elements if layer.takes else 0 for layer in layers[1:])
    return Sections(tuple(sections), kinds, rows, takes)


def counterparts(strategy: Strategy) -> Iterator[Strategy]:
    """Yield `strategy` with its ranks of tp as ranks of dp, and as ranks of fsdp, for sections that tp cannot split."""
    roles: tuple[Role, Role] = ("dp", "fsdp")
    for role in roles:
        degree = strategy.degree("tp") * strategy.degree(role)
        kept = tuple(Axis(role, degree) if axis.role == role else axis for axis in strategy.axes if axis.role != "tp")
        axes = kept if strategy.has(role) else (*kept, Axis(role, degree))
        try:
            yield replace(strategy, axes=axes, tensor_mode="1d", depth=None, sequence_parallel=False)
        except StrategyError:
            continue
