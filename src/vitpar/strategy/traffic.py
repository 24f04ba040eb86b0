"""Collectives of a layer along the tensor axes for each micro-batch: operation, group, size, by mode and role.

The rules mirror ``vitpar.parallel.tensor``. Tests compare it with the communication of a real step, operation by
operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from vitpar.models.description import LayerDescription, Part
from vitpar.strategy.layer import Strategy
from vitpar.strategy.splits import mode_of


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
NO_TRAFFIC: Traffic = Counter()
"""Traffic of what sends nothing. It is never changed."""


def layer_traffic(layer: LayerDescription, strategy: Strategy, rows: int) -> tuple[Traffic, Traffic]:
    """Return the communication of one rank for a micro-batch of `rows` images per stage, as (forward, backward).

    Weights are not counted, nor partial gradients of biases and norms, which are summed once per step.
    """
    side = dict(strategy.tensor_shape)["j"]
    forward, backward = Counter[Collective](), Counter[Collective]()
    if side == 1:
        return forward, backward
    mode, images, last = mode_of(strategy), rows // strategy.data_parallel, None
    for number, part in enumerate(layer.parts):
        found = _RULES[mode].get(part.role, _none)(part, images, side)
        forward, backward = forward + found.forward, backward + found.back
        if layer.backward != "inputs":
            backward += found.for_weights
        # The lowest trained layer begins with a norm, whose input needs no gradient.
        if layer.backward != "weights" or number > 0 or part.role != "norm":
            backward += found.for_input
        last = found.last if part.product else None if part.role == "scale" else last
    if layer.backward == "nothing":
        return forward, Counter()
    # Full checkpointing repeats the communication of forward. Nothing in backward needs the result of the last
    # collective, so recomputation stops before it, unless a factor follows. The selective policy keeps the results of
    # communication and repeats none.
    again = forward - Counter([last] if last else []) if strategy.checkpoint == "full" else Counter[Collective]()
    return forward, backward + again


class Beside(NamedTuple):
    """Collective that runs in backward beside a matrix product."""

    collective: Collective
    """The collective."""
    times: int
    """Number of times that it runs."""
    share: float
    """FLOPs of the product over those of the layer's backward, recomputation included."""


def traffic_beside_products(layer: LayerDescription, strategy: Strategy, rows: int) -> list[Beside]:
    """Return what of a layer's communication in backward runs beside products, for a micro-batch as in `layer_traffic`.

    It does so only if one backward computes all gradients: not under a schedule that splits it.
    """
    side = dict(strategy.tensor_shape)["j"]
    if side == 1 or layer.backward in ("nothing", "inputs"):
        return []
    # layer.flops are those of three passes, one of them forward.
    passes, found = 1.0 if strategy.checkpoint == "full" else 2 / 3, []
    for number, part in enumerate(layer.parts):
        sent = _RULES[mode_of(strategy)].get(part.role, _none)(part, rows // strategy.data_parallel, side)
        if sent.beside and (number > 0 or layer.backward == "all"):
            share = part.flops / (passes * layer.flops)
            found += [Beside(*item, share) for item in (sent.for_input + sent.for_weights).items()]
    return found


class _PartTraffic(NamedTuple):
    """Traffic of a part."""

    forward: Traffic = NO_TRAFFIC
    """Collectives of forward."""
    back: Traffic = NO_TRAFFIC
    """Collectives of backward that all gradients need."""
    for_input: Traffic = NO_TRAFFIC
    """Collectives of backward that only the gradient of the input needs."""
    for_weights: Traffic = NO_TRAFFIC
    """Collectives of backward that only the gradients of weights need."""
    last: Collective | None = None
    """Collective after the product in forward."""
    beside: bool = False
    """Whether what only one gradient needs is sent while the product of the other one is computed."""


_Rule = Callable[[Part, int, int], _PartTraffic]
"""Function of a part, the images of a tensor group, and the number of ranks along an axis."""


def _none(part: Part, images: int, side: int) -> _PartTraffic:
    return _PartTraffic()


def _whole(part: Part, images: int, side: int) -> tuple[Callable[[str], Collective], Callable[[str], Collective]]:
    """Return collectives along j, by operation, of (all that a linear layer takes, all that it gives)."""
    taken, given = part.product or (0, 0)
    cells = images * part.tokens
    return (
        lambda operation: Collective(operation, "j", side, cells * taken),
        lambda operation: Collective(operation, "j", side, cells * given),
    )


def _column(part: Part, images: int, side: int) -> _PartTraffic:
    taken, _ = _whole(part, images, side)
    return _PartTraffic(for_input=Counter([taken("all_reduce")]), beside=True)


def _row(part: Part, images: int, side: int) -> _PartTraffic:
    _, given = _whole(part, images, side)
    return _PartTraffic(Counter([given("all_reduce")]), last=given("all_reduce"))


def _row_of_whole(part: Part, images: int, side: int) -> _PartTraffic:
    """Return the traffic of a linear layer whose input is complete on every rank, which takes its part of it."""
    taken, given = _whole(part, images, side)
    gather = Counter([taken("all_gather")])
    return _PartTraffic(Counter([given("all_reduce")]), for_input=gather, last=given("all_reduce"))


def _column_sp(part: Part, images: int, side: int) -> _PartTraffic:
    # Backward gathers again: the gathered input is not kept for the gradient of the weight.
    taken, _ = _whole(part, images, side)
    gather, scatter = Counter([taken("all_gather")]), Counter([taken("reduce_scatter")])
    return _PartTraffic(gather, for_input=scatter, for_weights=gather, beside=True)


def _row_sp(part: Part, images: int, side: int) -> _PartTraffic:
    _, given = _whole(part, images, side)
    gather = Counter([given("all_gather")])
    return _PartTraffic(Counter([given("reduce_scatter")]), back=gather, last=given("reduce_scatter"))


def _pooled_sp(part: Part, images: int, side: int) -> _PartTraffic:
    return _PartTraffic(Counter({Collective("all_gather", "j", side, images * part.width): part.tokens}))


def _features(axis: str, *, pooled: bool = False) -> _Rule:
    """Return the rule of a linear layer whose input features are gathered over `axis` before the product.

    Backward gathers them again, and reduce-scatters their gradients. pooled: whether tokens are computed one by one.
    """

    def rule(part: Part, images: int, side: int) -> _PartTraffic:
        cells = images * (1 if pooled else part.tokens) // _rows(axis, side)
        (taken, _), times = part.product or (0, 0), part.tokens if pooled else 1
        gather, scatter = (Collective(kind, axis, side, cells * taken) for kind in ("all_gather", "reduce_scatter"))
        gathers = Counter({gather: times})
        return _PartTraffic(gathers, for_input=Counter({scatter: times}), for_weights=gathers, beside=True)

    return rule


def _norm(axis: str, *, rows: int | None = None) -> _Rule:
    """Return the rule of a norm of split features, which all-reduces their statistics: of an RMSNorm only one number.

    rows: parts of the rows of a tensor group, in powers of the side; None as for the features of the tokens.
    """

    def rule(part: Part, images: int, side: int) -> _PartTraffic:
        cells = images * part.tokens // (_rows(axis, side) if rows is None else side**rows)
        numbers = 2 if "bias" in part.shapes else 1
        forward = Counter({Collective("all_reduce", axis, side, cells): numbers})
        return _PartTraffic(forward, for_input=Counter([Collective("all_reduce", axis, side, numbers * cells)]))

    return rule


def _classifier(axis: str) -> _Rule:
    def rule(part: Part, images: int, side: int) -> _PartTraffic:
        _, classes = part.product or (0, 0)
        last = Collective("all_reduce", axis, side, images * part.tokens // _rows(axis, side) * classes)
        return _PartTraffic(Counter([last]), last=last)

    return rule


def _cube(part: Part, images: int, side: int) -> _PartTraffic:
    """Return the traffic of a product under 3d.

    It gathers rows over one axis and reduce-scatters its partial sums over the other. The axes swap from product to
    product, so the output of one is laid out as the input of the next.
    """
    gathered, summed = ("j", "k") if part.role == "column" else ("k", "j")
    taken, given = (images * part.tokens * features // side for features in part.product or (0, 0))
    last = Collective("reduce_scatter", summed, side, given)
    gather = Collective("all_gather", gathered, side, taken)
    return _PartTraffic(
        Counter([gather, last]),
        back=Counter([Collective("all_gather", summed, side, given)]),
        for_input=Counter([Collective("reduce_scatter", gathered, side, taken)]),
        for_weights=Counter([gather]),
        last=last,
        beside=True,
    )


def _rows(axis: str, side: int) -> int:
    """Return the parts of the rows of a tensor group where `axis` splits the features: 3d splits the rows over j."""
    return side if axis == "k" else 1


def _of_features(axis: str) -> dict[str, _Rule]:
    return {
        "norm": _norm(axis),
        "merge": _features(axis),
        "representation": _features(axis, pooled=True),
        "classifier": _classifier(axis),
    }


_RULES: dict[str, dict[str, _Rule]] = {
    "1d": {
        "column": _column,
        "row": _row,
        "inner_norm": _norm("j"),
        "merge": _row_of_whole,
        "classifier": _row_of_whole,
    },
    "sp": {
        "column": _column_sp,
        "row": _row_sp,
        "inner_norm": _norm("j"),
        "pooled": _pooled_sp,
        "classifier": _row_of_whole,
    },
    "2d": {"column": _features("j"), "row": _features("j"), "inner_norm": _norm("j"), **_of_features("j")},
    "3d": {"column": _cube, "row": _cube, "inner_norm": _norm("j", rows=1), **_of_features("k")},
}
_RULES["2.5d"] = _RULES["2d"]
"""Traffic of a part by mode and role; roles that are left out have none."""
