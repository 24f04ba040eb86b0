"""Parameters kept in float32 and computed with in 16 bits, where ``fully_shard`` has nothing else to do.

For the time of a step, or of an evaluation batch, copies take the places of the parameters in their modules. One
operation a layer makes them, and its backward brings the gradients back: so those of a layer are float32 as soon as
backward has passed it, and several micro-batches add up in float32. ``fully_shard`` would do the same with every copy
made twice through a buffer, and hooks around every layer (more than half of the host's time in a small model's step).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitpar.models.vit import local


class _Copies(torch.autograd.Function):
    """Tensors in another number type, and their gradients back, by one operation each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kept = tensors[0].dtype
        return _converted(tensors, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(_converted([g for g in gradients if g is not None], ctx.kept))
        return None, *(None if g is None else next(found) for g in gradients)


def _converted(tensors: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    given = list(tensors)
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in given]
    torch._foreach_copy_(copies, given)
    return tuple(copies)


class NarrowCopies:
    """Of the parameters of some layers, in `dtype`."""

    def __init__(self, layers: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._layers = [
            [
                (module._parameters, name)
                for module in layer.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None
            ]
            for layer in layers
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Copies of the parameters as they are now stand in their places. Backward has to end inside, too: what is
        checkpointed computes with them again."""
        kept = []
        try:
            for places in self._layers:
                parameters = [parameter for holder, name in places if (parameter := holder[name]) is not None]
                copies = _Copies.apply(self._dtype, *map(local, parameters))
                for (holder, name), parameter, copy in zip(places, parameters, copies, strict=True):
                    kept.append((holder, name, parameter))
                    holder[name] = copy
            yield
        finally:
            for holder, name, parameter in kept:
                holder[name] = parameter
