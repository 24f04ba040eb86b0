"""Collectives of a layer along the tensor axes for each micro-batch: operation, group, size, by mode and role.

The exchanges are those of ``vitpar.models.roles``, by which ``vitpar.parallel.tensor`` computes too. Tests compare them
with the communication of a real step, operation by operation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from vitpar.models.description import LayerDescription, Part
from vitpar.models.roles import GATHER_IDS, GATHER_POOLED, STATISTICS, TABLE, UNSPLIT, Message, TensorRole
from vitpar.strategy.layer import Strategy


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

    That of the loss of a split vocabulary is part of the last layer's. What a loss measures besides is left out.
    Weights are not counted, nor partial gradients of biases and norms, which are summed once per step.
    """
    side = dict(strategy.tensor_shape)["j"]
    forward, backward = Counter[Collective](), Counter[Collective]()
    if side == 1:
        return forward, backward
    last, first = None, _first_trained(layer)
    for number, part in enumerate(layer.parts):
        sent = _part_traffic(part, strategy, rows // strategy.data_parallel)
        forward += sent.forward
        if number >= first:
            backward += sent.backward
        if layer.multiplies_for_weight(part) or (part.product is None and layer.trains(part)):
            backward += sent.for_weights
        if number > first:
            backward += sent.for_input
        if part.product or part.role == "vocabulary_embedding":
            last = sent.last
        elif part.role in ("scale", "norm"):
            last = None
    loss = _loss_traffic(layer, strategy, rows // strategy.data_parallel)
    if layer.backward == "nothing":
        return forward + loss, Counter()
    # Full checkpointing repeats the communication of forward. Nothing in backward needs the result of the last
    # collective, so recomputation stops before it, unless a factor or a norm follows. The selective policy keeps the
    # results of communication and repeats none.
    again = forward - Counter([last] if last else []) if strategy.checkpoint == "full" else Counter[Collective]()
    return forward + loss, backward + again


def _first_trained(layer: LayerDescription) -> int:
    """Return the index of the part of a layer that ends backward, since its input needs no gradient; -1 for none.

    In the lowest trained layer that is the first one with a trained parameter.
    """
    trained = (number for number, part in enumerate(layer.parts) if layer.trains(part))
    return next(trained, -1) if layer.backward == "weights" else -1


def _loss_traffic(layer: LayerDescription, strategy: Strategy, images: int) -> Traffic:
    """Return the traffic of a loss whose vocabulary is split: the largest logit of a token, then two sums.

    images: those of a tensor group.
    """
    side = dict(strategy.tensor_shape)["j"]
    tokens = sum(images * part.tokens for part in layer.parts if layer.last and part.role == "vocabulary_output")
    sizes = (tokens, 2 * tokens) if tokens else ()
    return Counter({Collective("all_reduce", "j", side, elements): 1 for elements in sizes})


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
    # layer.flops are those of three passes, one of them forward, if all is trained.
    passes, besides, first = 1.0 if strategy.checkpoint == "full" else 2 / 3, [], _first_trained(layer)
    for number, part in enumerate(layer.parts):
        sent = _part_traffic(part, strategy, rows // strategy.data_parallel)
        if sent.beside and number > first and layer.multiplies_for_weight(part):
            share = part.flops / (passes * layer.flops)
            besides += [Beside(*item, share) for item in (sent.for_input + sent.for_weights).items()]
    return besides


class _PartTraffic(NamedTuple):
    """Traffic of a part, by what needs it (`vitpar.models.roles.Exchange`)."""

    forward: Traffic = NO_TRAFFIC
    """Collectives of forward."""
    backward: Traffic = NO_TRAFFIC
    """Collectives of backward that all gradients need."""
    for_input: Traffic = NO_TRAFFIC
    """Collectives of backward that only the gradient of the input needs."""
    for_weights: Traffic = NO_TRAFFIC
    """Collectives of backward that only the gradients of weights need."""
    last: Collective | None = None
    """Collective after the product in forward."""
    beside: bool = False
    """Whether what only one gradient needs is sent while the product of the other one is computed."""


def _part_traffic(part: Part, strategy: Strategy, images: int) -> _PartTraffic:
    """Return the traffic of a part.

    images: those of a tensor group.
    """
    role, side = TABLE[strategy.mode].get(part.role, UNSPLIT), dict(strategy.tensor_shape)["j"]
    # Under 3d one axis sends, and the other one splits what is sent.
    splits = strategy.mode == "3d" and not role.whole_output
    tokens = images * (1 if role.one_by_one else part.tokens) // (side if splits else 1)
    sent = {purpose: Counter[Collective]() for purpose in ("forward", "backward", "for_input", "for_weights")}
    last = None
    for message in filter(None, (role.before, role.gathered, role.after)):
        for purpose, collectives in sent.items():
            if operation := getattr(message.exchange, purpose):
                elements, times = _size(part, role, message, purpose, images, tokens)
                collectives[Collective(operation, message.axis, side, elements)] += times
                if message is role.after and purpose == "forward":
                    last = Collective(operation, message.axis, side, elements)
    return _PartTraffic(**sent, last=last, beside=role.before is not None and role.before.exchange.beside)


def _size(part: Part, role: TensorRole, message: Message, purpose: str, images: int, tokens: int) -> tuple[int, int]:
    """Return the elements of a collective, and the number of times that it runs.

    tokens: those that ranks along the axis of the message compute together.
    """
    if message is role.before and message.exchange is GATHER_POOLED:
        return images * part.width, part.tokens
    if message.exchange is GATHER_IDS:
        return tokens, 1
    if message.exchange is STATISTICS:  # an RMSNorm has one number; backward sends both in one message
        numbers = 2 if "bias" in part.shapes else 1
        return (tokens, numbers) if purpose == "forward" else (numbers * tokens, 1)
    taken, given = part.product or (part.width, part.width)
    features = taken if message is role.before else given
    return tokens * features, part.tokens if role.one_by_one else 1
