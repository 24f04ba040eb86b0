"""Numeric precisions: data types of parameters, compute and gradient reduction.

| precision | parameters and optimizer | compute and activations | gradient reduction            |
|-----------|--------------------------|-------------------------|-------------------------------|
| fp64      | float64                  | float64                 | float64                       |
| fp32      | float32                  | float32                 | float32                       |
| bf16      | float32                  | bfloat16                | float32, or bfloat16 if asked |
| fp16      | float32                  | float16                 | float32, or float16 if asked  |
| fp8       | float32                  | bfloat16                | float32, or bfloat16 if asked |

In fp8 the linear layers of blocks multiply in float8 (``vitpar.parallel.float8``); everything else is as in bf16.

Reduction is the sum over data-parallel ranks. A 16-bit type halves its traffic. If parameters are sharded, the
micro-batches then also accumulate in 16 bits before the reduction. After it gradients are float32 again. float16
overflows at 65504 and flushes values below 6e-8 to zero, so the loss is scaled up before backward
(``vitpar.training.optim.loss_scale``).

Layers that compute in 16 bits need 16-bit copies of their parameters. ``fully_shard`` makes them for the layers it
wraps. In other layers `LowPrecisionParams` puts the copies in place of the parameters for one step or one evaluation
batch. One autograd operation per layer makes the copies, and its backward converts the gradients: they are float32 as
soon as backward has passed the layer, and micro-batches accumulate in float32. ``fully_shard`` would make every copy
twice, through a buffer, and add hooks to every layer (more than half of the host time of a small model's step).

With one rank and one micro-batch nothing is added to a gradient. An optimizer that reads 16-bit gradients
(``vitpar.training.optim.one_pass``) then gets those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vitpar.errors import RecipeError
from vitpar.sharded import local, to_local
from vitpar.strategy.execution import REDUCE_DTYPES
from vitpar.strategy.precisions import PRECISION_TYPES


@dataclass(frozen=True)
class Precision:
    """Data types of one row of the table above."""

    parameters: torch.dtype
    """Data type of parameters and optimizer state."""
    compute: torch.dtype
    """Data type of compute and activations."""
    reduce: torch.dtype
    """Data type in which gradients are summed over data-parallel ranks."""
    float8: bool = False
    """Whether the linear layers of blocks multiply in float8."""

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """Mixed-precision policy for FSDP2."""
        if self.compute is self.parameters:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a scaled loss: only the range of float16 is too small for them."""
        return self.compute is torch.float16


PRECISIONS = {
    name: Precision(
        getattr(torch, types.parameters.name),
        getattr(torch, types.compute.name),
        getattr(torch, types.reduce.name),
        types.float8,
    )
    for name, types in PRECISION_TYPES.items()
}


def resolve_precision(name: str, reduce_dtype: str | None = None) -> Precision:
    """Return the precision called `name`.

    reduce_dtype: "fp32", "bf16" or "fp16" to reduce gradients in; None for the first entry of the table.

    Raises RecipeError for an unknown name, and for a reduction that is not in the table.
    """
    if name not in PRECISIONS:
        raise RecipeError(f"unknown precision '{name}': use {', '.join(PRECISIONS)}")
    precision = PRECISIONS[name]
    if reduce_dtype is None:
        return precision
    if reduce_dtype not in ("fp32", REDUCE_DTYPES.get(name)) or name not in REDUCE_DTYPES:
        fix = f"use fp32 or {REDUCE_DTYPES[name]}" if name in REDUCE_DTYPES else "leave train.reduce_dtype out"
        raise RecipeError(f"{name} cannot reduce gradients in '{reduce_dtype}': {fix}")
    return replace(precision, reduce=PRECISIONS[reduce_dtype].compute)


def slow_here(name: str, device: torch.device) -> str | None:
    """Return a warning if this device has no instructions for the precision `name`, else None."""
    known = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    if device.type != "cpu" or name not in (*known, "fp8"):
        return None
    if name in known and torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, known[name])():
        return None
    return f"this CPU has no {name} instructions: steps take far longer than in fp32"


class _Copies(torch.autograd.Function):
    """Conversion of several tensors to another dtype, and of their gradients back, by one foreach operation each."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, made: Sequence[Tensor | None], keep_gradients: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        # Parameters without gradient get None in backward, not zeros: see the filter there.
        ctx.set_materialize_grads(False)
        ctx.kept = None if keep_gradients else tensors[0].dtype
        missing = [tensor for tensor, copy in zip(tensors, made, strict=True) if copy is None]
        converted = iter(_converted(missing, dtype) if missing else ())
        copies = tuple(next(converted) if copy is None else copy.detach() for copy in made)
        # Otherwise backward would compute gradients of the copies of frozen parameters, too.
        frozen = (copy for copy, needed in zip(copies, ctx.needs_input_grad[3:], strict=True) if not needed)
        ctx.mark_non_differentiable(*frozen)
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.kept is None:
            return None, None, None, *gradients
        converted = iter(_converted([g for g in gradients if g is not None], ctx.kept))
        return None, None, None, *(None if g is None else next(converted) for g in gradients)


def _converted(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class LowPrecisionParams:
    """Copies, in `dtype`, of the parameters of some layers.

    without: parameters that are used as they are.

    An optimizer may write the copies itself: into each `target`, with `written` after it. They are then used until
    anything else changes the parameter. Other copies are made for each `in_place`.
    """

    def __init__(self, layers: Iterable[nn.Module], dtype: torch.dtype, without: Collection[nn.Parameter] = ()) -> None:
        self._dtype = dtype
        left_out = {id(parameter) for parameter in without}
        self._layers = [
            [
                (module._parameters, name)
                for module in layer.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None and id(parameter) not in left_out
            ]
            for layer in layers
        ]
        self._targets: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}  # of a parameter when its copy was written
        self._copied = {holder[name] for places in self._layers for holder, name in places}

    def target(self, parameter: Tensor) -> Tensor | None:
        """Return the tensor for the 16-bit copy of a parameter's local part; None if the model uses no copy of it."""
        if parameter not in self._copied:
            return None
        if parameter not in self._targets:
            self._targets[parameter] = torch.empty_like(local(parameter.detach()), dtype=self._dtype)
        return self._targets[parameter]

    def written(self, parameters: Iterable[Tensor]) -> None:
        """Use the targets of `parameters`, where they have one, as their copies."""
        for parameter in parameters:
            if parameter in self._targets:
                self._versions[parameter] = local(parameter)._version

    def forget(self) -> None:
        """Drop the written copies, and their memory."""
        self._targets.clear()
        self._versions.clear()

    def _written_copy(self, parameter: Tensor) -> Tensor | None:
        # A version counts the changes of a tensor, so that a parameter that was loaded or replaced is copied again.
        current = self._versions.get(parameter) == local(parameter)._version
        return self._targets[parameter] if current else None

    @contextmanager
    def in_place(self, keep_gradients: bool = False) -> Iterator[None]:
        """Put copies of the current parameters in their places; on exit, put the parameters back.

        keep_gradients: whether parameters, which must be plain tensors, get gradients in `dtype` instead of their own;
            micro-batches would then accumulate in `dtype`.

        Backward must end inside, too, because checkpointed layers recompute their forward with the copies.
        """
        kept = []
        try:
            for places in self._layers:
                parameters = [parameter for holder, name in places if (parameter := holder[name]) is not None]
                if keep_gradients:
                    for parameter in parameters:
                        parameter.grad_dtype = None  # otherwise autograd converts gradients to float32
                made = [self._written_copy(parameter) for parameter in parameters]
                copies = _Copies.apply(self._dtype, made, keep_gradients, *map(to_local, parameters))
                for (holder, name), parameter, copy in zip(places, parameters, copies, strict=True):
                    kept.append((holder, name, parameter))
                    holder[name] = copy
            yield
        finally:
            for holder, name, parameter in kept:
                holder[name] = parameter
