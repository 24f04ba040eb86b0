"""Collectives of a layer along the tensor axes for each micro-batch, as a table: operation, group, size.

The table mirrors ``vitpar.parallel.tensor``. Tests compare it with the communication of a real step, operation by
operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vitpar.strategy.layer import Strategy
from vitpar.strategy.validate import ModelShape


@dataclass(frozen=True)
class Collective:
    """A collective along a tensor axis."""

    operation: str
    """Operation: all_reduce, all_gather or reduce_scatter."""
    axis: str
    """Name of the tensor axis, as in `Strategy.tensor_shape`."""
    ranks: int
    """Number of ranks along the axis."""
    elements: int
    """Number of elements of the complete tensor: the output of all_gather, the input of reduce_scatter."""

    @property
    def received(self) -> float:
        """Elements that a rank receives with ring algorithms."""
        share = self.elements * (self.ranks - 1) / self.ranks
        return 2 * share if self.operation == "all_reduce" else share


Traffic = Counter[Collective]
"""Number of times that each collective runs."""
_Kept = tuple[Traffic, Traffic, Collective | None]
"""Traffic of (forward, backward without recomputation), and the collective after the last product of forward."""


def block_traffic(model: ModelShape, strategy: Strategy, rows: int) -> tuple[Traffic, Traffic]:
    """Return the communication of one rank for a micro-batch of `rows` images per stage, as (forward, backward).

    Weights are not counted, nor partial gradients of biases and norms, which are summed once per step.
    """
    shape = dict(strategy.tensor_shape)
    if shape["j"] == 1:
        return Counter(), Counter()
    forward, backward, last = _block(model, strategy, rows)
    return forward, backward + _again(strategy, forward, last)


def _block(model: ModelShape, strategy: Strategy, rows: int) -> _Kept:
    """Return the communication of a block without checkpointing."""
    shape = dict(strategy.tensor_shape)
    cells = rows // strategy.data_parallel * model.tokens  # tokens of the images that a tensor group works on
    if strategy.tensor_mode == "3d":
        return _cube(model, shape["j"], cells)
    if strategy.tensor_mode != "1d":
        return _square(model, shape["j"], cells)
    whole = cells * model.embed_dim
    if strategy.sequence_parallel:
        # Backward gathers two tensors more than forward: the gathered inputs of the two column-parallel products are
        # not kept, but gathered again for the gradients of weights.
        gather, scatter = (Collective(kind, "j", shape["j"], whole) for kind in ("all_gather", "reduce_scatter"))
        return Counter({gather: 2, scatter: 2}), Counter({gather: 4, scatter: 2}), scatter
    reduce = Collective("all_reduce", "j", shape["j"], whole)
    return Counter({reduce: 2}), Counter({reduce: 2}), reduce


def _again(strategy: Strategy, forward: Traffic, last: Collective | None) -> Traffic:
    """Return the communication that full checkpointing repeats in backward: that of forward without `last`.

    Nothing in backward needs the result of the last collective, so recomputation stops before it. The selective policy
    keeps the results of communication and repeats none.
    """
    if strategy.checkpoint != "full":
        return Counter()
    return forward - Counter([last] if last else [])


def head_traffic(model: ModelShape, strategy: Strategy, rows: int) -> tuple[Traffic, Traffic]:
    """Return the communication of the head, as (forward, backward). Embed has none."""
    shape = dict(strategy.tensor_shape)
    side, forward, backward = shape["j"], Counter[Collective](), Counter[Collective]()
    if side == 1:
        return forward, backward
    images, classifiers = rows // strategy.data_parallel, 1 + model.distillation
    if strategy.tensor_mode == "1d":
        if strategy.sequence_parallel:
            forward[Collective("all_gather", "j", side, images * model.embed_dim)] += classifiers
        last = Collective("all_reduce", "j", side, images * model.num_classes)
        forward[last] += classifiers
        backward[Collective("all_gather", "j", side, images * model.features)] += classifiers
        return forward, backward + _again(strategy, forward, last)
    axis = "k" if strategy.tensor_mode == "3d" else "j"
    images //= side if axis == "k" else 1
    normed = images * (model.tokens if model.pool == "avg" else classifiers)
    forward[Collective("all_reduce", axis, side, normed)] += 2
    backward[Collective("all_reduce", axis, side, 2 * normed)] += 1
    if model.representation_size:
        pooled = images * model.embed_dim
        forward[Collective("all_gather", axis, side, pooled)] += classifiers
        backward[Collective("all_gather", axis, side, pooled)] += classifiers
        backward[Collective("reduce_scatter", axis, side, pooled)] += classifiers
    last = Collective("all_reduce", axis, side, images * model.num_classes)
    forward[last] += classifiers
    return forward, backward + _again(strategy, forward, last)


def _square(model: ModelShape, q: int, cells: int) -> _Kept:
    """Return the communication of a block under 2d and 2.5d.

    Features are gathered before each of the four products, and again in backward, which reduce-scatters their
    gradients. The all-reduces are for the statistics of the two norms.

    q: ranks along j
    cells: tokens of the images that a tensor group works on
    """
    forward: Traffic = Counter({Collective("all_reduce", "j", q, cells): 4})
    backward: Traffic = Counter({Collective("all_reduce", "j", q, 2 * cells): 2})
    for features in (model.embed_dim, model.embed_dim, model.embed_dim, model.mlp_hidden_dim):
        forward[Collective("all_gather", "j", q, cells * features)] += 1
        backward[Collective("all_gather", "j", q, cells * features)] += 1
        backward[Collective("reduce_scatter", "j", q, cells * features)] += 1
    return forward, backward, None


def _cube(model: ModelShape, q: int, cells: int) -> _Kept:
    """Return the communication of a block under 3d.

    Each product gathers rows over one axis and reduce-scatters its partial sums over the other. The axes swap from
    product to product, so the output of one is laid out as the input of the next. The all-reduces are for the norms.

    q: ranks along each axis
    cells: tokens of the images that a tensor group works on
    """
    forward: Traffic = Counter({Collective("all_reduce", "k", q, cells // q): 4})
    backward: Traffic = Counter({Collective("all_reduce", "k", q, 2 * cells // q): 2})
    width, hidden = model.embed_dim, model.mlp_hidden_dim
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
    return forward, backward, Collective("reduce_scatter", "j", q, cells * width // q)
