"""The four linear layers of a block in float8 (precision fp8).

| product               | of                         | number type                                            |
|-----------------------|----------------------------|--------------------------------------------------------|
| the output            | input, weight              | float8_e4m3, scaled by token and by row of the weight  |
| the input's gradient  | output's gradient, weight  | the same, by column of the weight                      |
| the weight's gradient | output's gradient, input   | bfloat16: a sum over all tokens loses most             |

Scales are powers of two, which round nothing, so that the largest number of a row fills the type. A token's scale is
its own: it does not depend on the samples beside it, and so not on how a plan splits the batch. Where tensor
parallelism splits what a product sums over, each part has its own scales, finer than those of the whole.

Source of the recipe: torchao's ``rowwise_with_gw_hp``, but for the weight in the input's gradient, which has one scale
there.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vitpar.errors import RecipeError
from vitpar.models.vit import Block
from vitpar.sharded import to_local

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of its numbers
SMALLEST = 2.0**-100  # of what scales are made for: a row of zeros has one too
MULTIPLE = 16
"""Number that both sizes of a weight must be multiples of, on GPUs."""
PROBE = 256
"""Rows and columns of the product that `float8_fault` tries. cuBLASLt may have no algorithm for a smaller one."""


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, features] in float8, and what each row is to be multiplied by [rows, 1], float32."""
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    scale = torch.exp2(torch.ceil(torch.log2(most / LARGEST)))
    return (wide / scale).to(E4M3), scale


def multiply(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, dtype: torch.dtype, fast: bool = True) -> Tensor:
    """a @ b.T in `dtype`. a [rows, in], b [columns, in]: in float8, of_a and of_b their scales. fast: whether GPUs may
    add up in fewer bits than float32 has."""
    columns = b.contiguous().t()
    return torch._scaled_mm(a, columns, scale_a=of_a, scale_b=of_b.t(), out_dtype=dtype, use_fast_accum=fast)


def product(x: Tensor, weight: Tensor, fast: bool = True) -> Tensor:
    """``linear(x, weight)`` in float8: x [..., in], weight [out, in] -> [..., out] in the type of x. No autograd."""
    y = multiply(*scaled_rows(x.flatten(0, -2)), *scaled_rows(weight), x.dtype, fast)
    return y.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x = for_weight = None
        if ctx.needs_input_grad[0]:
            for_x = product(gradient, weight.t(), fast=False)
        if ctx.needs_input_grad[1]:
            for_weight = gradient.flatten(0, -2).mT @ x.flatten(0, -2)
        return for_x, for_weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product`, with gradients."""
    y = _Linear.apply(x, weight)
    return y if bias is None else y + bias


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, to_local(module.weight), to_local(module.bias))


def compute_in_float8(block: Block) -> None:
    """Let the linear layers of `block` compute in float8, with the parts of their weights that they have: after they
    were split, before they are compiled. Raises RecipeError for a part that GPUs cannot multiply."""
    for name, module in block.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        sizes = to_local(module.weight).shape
        if any(size % MULTIPLE for size in sizes):
            raise RecipeError(
                f"train.precision fp8 needs weights whose sizes on every rank are multiples of {MULTIPLE}, but "
                f"blocks.{block.index}.{name} has {sizes[0]} x {sizes[1]}: use bf16, or a plan that splits it less"
            )
        module.float8 = True  # type: ignore[assignment]
        if "forward" not in vars(module):  # not split: else its own way asks
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def float8_fault(device: torch.device) -> str | None:
    """Return why nothing can be multiplied in float8 on `device`, in a few words; None where a small product works."""
    x = torch.ones(PROBE, PROBE, dtype=torch.bfloat16, device=device)
    try:
        product(x, x)
    except RuntimeError as error:  # a GPU, or a build of torch, that cannot
        return f"this {device.type} device cannot multiply in float8 ({str(error).splitlines()[0]})"
    return None
