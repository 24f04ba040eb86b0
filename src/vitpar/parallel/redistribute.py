"""Redistribution of an activation from one layout to another, by one all-to-all in which no rank receives what it has.

The transfers follow from the two layouts by arithmetic (``vitpar.strategy.layout.moves``), so any degrees work. Ranks
with copies of a part also have equal gradients of it. So backward is the same exchange with the layouts swapped, and
never has to sum.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vitpar.strategy.layout import ActivationPart, Layout, moves


class Redistribute:
    """Differentiable redistribution of activations [batch, tokens, features] from layout `source` to layout `target`.

    width: number of features of the global activation.
    group: ranks of the stage.
    ``vitpar plan`` lists a model's redistributions with both layouts.
    """

    def __init__(self, source: Layout, target: Layout, width: int, group: ProcessGroup) -> None:
        self._source, self._target, self._width, self._group = source, target, width, group

    def __call__(self, x: Tensor) -> Tensor:
        return _Exchange.apply(x, self._source, self._target, self._width, self._group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, target: Layout, width: int, group: ProcessGroup) -> Tensor:
        ctx.settings = (target, source, width, group)
        return _exchange(x, source, target, width, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _exchange(gradient, *ctx.settings), None, None, None, None


def _exchange(x: Tensor, source: Layout, target: Layout, width: int, group: ProcessGroup) -> Tensor:
    me, batch = group.rank(), x.shape[0] * source[0].rows
    given, taken, anything = _pieces(source, target, batch, width, me)
    rows, features = target[me].row_range(batch), target[me].feature_range(width)
    out = x.new_empty(len(rows), x.shape[1], len(features))
    if me in given:
        out[taken[me]] = x[given[me]]
    # Equal on all ranks. If any two ranks exchange something, ranks with nothing to send must join the collective, too.
    if not anything:
        return out
    others = [rank for rank in range(len(source)) if rank != me]
    sent = {rank: x[given[rank]].flatten() for rank in others if rank in given}
    places = {rank: out[taken[rank]] for rank in others if rank in taken}
    incoming = x.new_empty(sum(place.numel() for place in places.values()))
    dist.all_to_all_single(
        incoming,
        torch.cat(list(sent.values())) if sent else x.new_empty(0),
        [places[rank].numel() if rank in places else 0 for rank in range(len(source))],
        [sent[rank].numel() if rank in sent else 0 for rank in range(len(source))],
        group=group,
    )
    for place, piece in zip(places.values(), incoming.split([place.numel() for place in places.values()]), strict=True):
        place.copy_(piece.view_as(place))
    return out


_Piece = tuple[slice, slice, slice]
"""Index of a part of [batch, tokens, features]."""


@lru_cache(maxsize=64)
def _pieces(
    source: Layout, target: Layout, batch: int, width: int, me: int
) -> tuple[dict[int, _Piece], dict[int, _Piece], bool]:
    """Return the exchange of rank `me` as (sent, received, needed).

    sent: slices of its input by receiver.
    received: slices of its output by sender.
    needed: whether any two ranks exchange something.
    """
    every = moves(source, target, batch, width)
    given = {m.receiver: _slices(source[me], m.rows, m.features, batch, width) for m in every if m.sender == me}
    taken = {m.sender: _slices(target[me], m.rows, m.features, batch, width) for m in every if m.receiver == me}
    return given, taken, any(m.sender != m.receiver for m in every)


def _slices(part: ActivationPart, rows: range, features: range, batch: int, width: int) -> _Piece:
    first_row, first_feature = part.row_range(batch).start, part.feature_range(width).start
    return (
        slice(rows.start - first_row, rows.stop - first_row),
        slice(None),
        slice(features.start - first_feature, features.stop - first_feature),
    )
