"""What the ranks of a block send each other for every micro-batch, as a table: operation, group, size.

It is the runtime's communication along the tensor axes (``vitpar.parallel.tensor``) counted by arithmetic; the tests
compare it with what a step really sends, operation by operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from vitpar.strategy.layer import Strategy


class BlockShape(Protocol):
    """What the table has to know of a model."""

    @property
    def tokens(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def hidden(self) -> int:
        """Hidden features of a block's MLP."""


@dataclass(frozen=True)
class Collective:
    """`operation` (all_reduce, all_gather, reduce_scatter) over `ranks` ranks along a tensor axis, on a tensor of
    `elements` (of the whole: what is gathered, or what is scattered)."""

    operation: str
    axis: str
    ranks: int
    elements: int

    @property
    def received(self) -> float:
        """Elements that a rank receives, by ring algorithms."""
        share = self.elements * (self.ranks - 1) / self.ranks
        return 2 * share if self.operation == "all_reduce" else share


Traffic = Counter[Collective]


def block_traffic(model: BlockShape, strategy: Strategy, rows: int) -> tuple[Traffic, Traffic]:
    """What one rank takes part in for a micro-batch of `rows` images over the stage: (in forward, in backward).

    Without recomputation, biases' and norms' partial gradients (once a step) and weights.
    """
    shape = dict(strategy.tensor_shape)
    if shape["j"] == 1:
        return Counter(), Counter()
    cells = rows // strategy.data_parallel * model.tokens  # tokens of the images that a tensor group works on
    if strategy.tensor_mode == "3d":
        return _cube(model, shape["j"], cells)
    if strategy.tensor_mode != "1d":
        return _square(model, shape["j"], cells)
    whole = cells * model.width
    if strategy.sequence_parallel:
        gather, scatter = (Collective(kind, "j", shape["j"], whole) for kind in ("all_gather", "reduce_scatter"))
        return Counter({gather: 2, scatter: 2}), Counter({gather: 4, scatter: 2})
    reduce = Collective("all_reduce", "j", shape["j"], whole)
    return Counter({reduce: 2}), Counter({reduce: 2})


def _square(model: BlockShape, q: int, cells: int) -> tuple[Traffic, Traffic]:
    """2d and 2.5d: features gathered before each of the four products, again in backward, where their gradients are
    scattered; the statistics of two norms."""
    forward: Traffic = Counter({Collective("all_reduce", "j", q, cells): 4})
    backward: Traffic = Counter({Collective("all_reduce", "j", q, 2 * cells): 2})
    for features in (model.width, model.width, model.width, model.hidden):
        forward[Collective("all_gather", "j", q, cells * features)] += 1
        backward[Collective("all_gather", "j", q, cells * features)] += 1
        backward[Collective("reduce_scatter", "j", q, cells * features)] += 1
    return forward, backward


def _cube(model: BlockShape, q: int, cells: int) -> tuple[Traffic, Traffic]:
    """3d: rows gathered over one axis, sums scattered over the other, the axes swapped from product to product."""
    forward: Traffic = Counter({Collective("all_reduce", "k", q, cells // q): 4})
    backward: Traffic = Counter({Collective("all_reduce", "k", q, 2 * cells // q): 2})
    width, hidden = model.width, model.hidden
    products = (
        ("j", "k", width, 3 * width),
        ("k", "j", width, width),
        ("j", "k", width, hidden),
        ("k", "j", hidden, width),
    )
    for gathered, summed, inside, outside in products:
        taken, given = cells * inside // q, cells * outside // q
        forward[Collective("all_gather", gathered, q, taken)] += 1
        forward[Collective("reduce_scatter", summed, q, given)] += 1
        backward[Collective("all_gather", summed, q, given)] += 1
        backward[Collective("all_gather", gathered, q, taken)] += 1
        backward[Collective("reduce_scatter", gathered, q, taken)] += 1
    return forward, backward
