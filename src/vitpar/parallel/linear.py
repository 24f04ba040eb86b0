"""Linear layers on local weights: those that communicate while backward computes, and those of blocks in float8.

The former need their complete input on every rank.

| order in backward | `column_linear`                 | `gathered_linear`                   |
|-------------------|---------------------------------|-------------------------------------|
| 1                 |                                 | start to gather the input           |
| 2                 | gradient of the input           | gradient of the input               |
| 3                 | start its all-reduce            | start its reduce-scatter            |
| 4                 |                                 | wait for the gathered input         |
| 5                 | gradient of the weight          | gradient of the weight              |
| 6                 | wait for the all-reduce         | wait for the reduce-scatter         |
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from vitpar.errors import RecipeError
from vitpar.models.description import ADAPTERS
from vitpar.models.layers import Layer
from vitpar.models.lora_layers import product_name
from vitpar.parallel import collective
from vitpar.parallel.float8 import FAST, Fast, multiply, product, scaled_rows
from vitpar.sharded import to_local
from vitpar.strategy.execution import FastAccum, multiplies_in_float8

MULTIPLE = 16
"""Both sizes of a weight must be multiples of this to multiply in float8 on GPUs."""


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup, in_float8: Fast | None = None
) -> Tensor:
    """Return ``linear(x, weight, bias)``; backward all-reduces the gradient of `x` (Megatron's f).

    x: replicated, [..., in]; its gradient is Partial -> Replicate, as each rank's weight contributes to all of it.
    weight, bias: this rank's [out, in] and [out].
    in_float8: which float8 products are fast (``vitpar.parallel.float8``); None to multiply in the type of `x`.
    """
    return _Linear.apply(x, weight, bias, None, group, in_float8)


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dim: int, group: ProcessGroup, in_float8: Fast | None = None
) -> Tensor:
    """Return ``linear(all_gather(x, dim), weight, bias)``; backward gathers `x` again: the gathered tensor is not kept.

    x: this rank's part along `dim`, [..., in / n] or [rows / n, ..., in].
    weight, bias: this rank's [out, in] and [out].
    in_float8: which float8 products are fast (``vitpar.parallel.float8``); None to multiply in the type of `x`.
    Backward reduce-scatters the gradient of `x`, Partial -> Shard(dim), as each rank's weight contributes to all of it.
    """
    return _Linear.apply(x, weight, bias, dim, group, in_float8)


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fast: Fast = Fast()) -> Tensor:
    """Return ``linear(x, weight, bias)`` multiplied in float8, differentiable, without communication."""
    return _Linear.apply(x, weight, bias, None, None, fast)


class _Linear(torch.autograd.Function):
    """Product with this rank's weight.

    dim: the dim along which ranks hold parts of `x`; None if each has all of it.
    group: ranks whose weights contribute to the gradient of `x`; None for this one alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dim: int | None,
        group: ProcessGroup | None,
        in_float8: Fast | None,
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.in_float8 = dim, group, in_float8
        # Save this rank's part, not the gathered tensor, which takes group.size() times the memory.
        ctx.save_for_backward(x, weight)
        whole = x if dim is None or group is None else collective.all_gather(x, dim, group)
        # The bias in the product: added to its output, it costs two passes over it.
        if in_float8:
            return product(whole, weight, in_float8.output, bias)
        return torch.nn.functional.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        dim, group, needs_x, needs_weight = ctx.dim, ctx.group, _needed(ctx, 0), _needed(ctx, 1)
        for_x = for_weight = None
        if needs_x:
            operands, fast = [gradient, weight], bool(ctx.in_float8 and ctx.in_float8.gradient)
            if ctx.in_float8:  # converted here, where the compiler sees it and can fuse it
                operands = [*scaled_rows(gradient.flatten(0, -2)), *scaled_rows(weight.t())]
            if group is None:
                for_x = _for_input(gradient, operands, fast)
                for_weight = _for_weight(gradient, x) if needs_weight else None
            elif needs_weight:
                both = _compiled if torch.compiler.is_compiling() else _overlapped
                for_x, for_weight = both(gradient, x, operands, fast, dim, group.group_name)
            elif dim is None:
                for_x = collective.all_reduce(_for_input(gradient, operands, fast), group)
            else:
                for_x = collective.reduce_scatter(_for_input(gradient, operands, fast), dim, group)
        elif needs_weight:
            for_weight = _for_weight(gradient, x if dim is None else collective.all_gather(x, dim, group))
        for_bias = gradient.flatten(0, -2).sum(0) if _needed(ctx, 2) else None
        return for_x, for_weight, for_bias, None, None, None


def _needed(ctx: Any, number: int) -> bool:
    """Return whether the running backward needs the gradient of tensor `number` among the inputs of a function.

    Schedules with a separate backward for weights run a function twice, for the gradients of inputs and for those of
    weights. `needs_input_grad` is set both times: each would compute and send what only the other one uses.
    """
    if torch.compiler.is_compiling() or not ctx.needs_input_grad[number]:  # such schedules refuse compiled blocks
        return ctx.needs_input_grad[number]
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad returns
        return True


def _for_input(gradient: Tensor, operands: list[Tensor], fast: bool) -> Tensor:
    """Return this rank's part of the gradient of the complete input.

    operands: (gradient, weight), or in float8 (gradient, its scales, transposed weight, its scales).
    fast: whether a float8 product may accumulate in fewer bits.
    """
    if len(operands) == 2:
        return operands[0] @ operands[1]
    a, of_a, b, of_b = operands
    return multiply(a, of_a, b, of_b, gradient.dtype, fast).unflatten(0, gradient.shape[:-1])


def _for_weight(gradient: Tensor, x: Tensor) -> Tensor:
    # Not in float8 either way: the sum over all tokens loses the most precision (vitpar.parallel.float8).
    return gradient.flatten(0, -2).mT @ x.flatten(0, -2)


def _overlapped(
    gradient: Tensor, x: Tensor, operands: list[Tensor], fast: bool, dim: int | None, group_name: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of (input, weight), in the order of the table above."""
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]
    if dim is None:
        summing = collective.start_all_reduce(_for_input(gradient, operands, fast), group)
        for_weight = _for_weight(gradient, x)
    else:
        gathering = collective.start_all_gather(x, group)
        summing = collective.start_reduce_scatter(_for_input(gradient, operands, fast), dim, group)
        for_weight = _for_weight(gradient, collective.finish_all_gather(gathering, dim, group))
    return collective.finish(summing, group), for_weight


# One operation for the compiler, which cannot look inside. upstream: inductor orders a graph for the least memory
# (reorder_for_peak_memory), by which waits follow their collectives at once; its passes for overlap sink the gradients
# of weights to the end of a block.
_compiled = torch.library.custom_op("vitpar::linear_gradients", _overlapped, mutates_args=())


@_compiled.register_fake
def _(
    gradient: Tensor, x: Tensor, operands: list[Tensor], fast: bool, dim: int | None, group_name: str
) -> tuple[Tensor, Tensor]:
    features = operands[1].shape[1] if len(operands) == 2 else operands[2].shape[0]
    return x.new_empty(x.shape), x.new_empty(gradient.shape[-1], features)


_MULTIPLY = {setting: partial(float8_linear, fast=fast) for setting, fast in FAST.items()}
"""One object for all layers: for another one the compiler would make another graph."""


def _forward(module: Any, x: Tensor) -> Tensor:
    return module.multiply(x, to_local(module.weight), None if module.bias is None else to_local(module.bias))


def compute_in_float8(block_name: str, block: Layer, min_features: int, fast: FastAccum = "forward") -> None:
    """Let the linear layers of `block` that are large enough multiply in float8, adapters excepted.

    block_name: name of the block, for messages.
    min_features: as in ``vitpar.strategy.execution.multiplies_in_float8``.
    fast: setting `train.fp8_fast_accum`.

    Call it after tensor parallelism split the weights, and before the block is compiled. Raises RecipeError if GPUs
    cannot multiply the local part of a weight.
    """
    for name, module in block.named_modules():
        if not isinstance(module, nn.Linear) or name.endswith(ADAPTERS):
            continue
        gives, takes = module.weight.shape  # of the complete weight, so that a layer computes alike under every plan
        if not multiplies_in_float8(takes, gives, min_features):
            continue
        sizes = to_local(module.weight).shape
        if any(size % MULTIPLE for size in sizes):
            raise RecipeError(
                f"train.precision fp8 needs weights whose sizes on every rank are multiples of {MULTIPLE}, but "
                f"{block_name}.{name} has {sizes[0]} x {sizes[1]}: use bf16, or a plan that splits it less"
            )
        module.float8 = FAST[fast]  # type: ignore[assignment]
        # A split module has its own forward, which reads `float8`, too.
        if (method := product_name(module)) not in vars(module):
            # With another bias, ``vitpar.models.compiled`` multiplies by this function itself.
            module.multiply = _MULTIPLY[fast]  # type: ignore[assignment]
            setattr(module, method, MethodType(_forward, module))
