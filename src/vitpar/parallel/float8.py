"""float8 matrix products of the linear layers of blocks (precision fp8).

| product            | operands                | data type                                                |
|--------------------|-------------------------|----------------------------------------------------------|
| output             | input, weight           | float8_e4m3, one scale per token and per weight row      |
| gradient of input  | output gradient, weight | float8_e4m3, one scale per token and per weight column   |
| gradient of weight | output gradient, input  | bfloat16: the sum over all tokens loses the most         |

``vitpar.strategy.execution.multiplies_in_float8`` decides which layers are large enough; ``vitpar.parallel.linear``
lets them multiply so.

Scales are powers of two, so scaling itself does not round; the largest value of a row comes close to the largest float8
value. Each token has a scale of its own, which does not depend on other samples, nor on how a plan splits the batch. If
tensor parallelism splits the dimension that a product sums over, each rank's part has its own, finer scales.

Source: torchao's recipe ``rowwise_with_gw_hp``. The difference: in the gradient of the input it uses one scale for the
complete weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vitpar.errors import RecipeError
from vitpar.models.config import ModelConfig
from vitpar.strategy.execution import FastAccum, multiplies_in_float8

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest value of `E4M3`."""
SMALLEST = 2.0**-100
"""Lower bound of a row's largest value when its scale is computed.

A row of zeros would otherwise get scale 0, and 0 / 0 is NaN.
"""
PROBE = 256
"""Rows and columns of the product that `float8_fault` tries. cuBLASLt may have no algorithm for a smaller one."""


class Fast(NamedTuple):
    """Products that GPUs may accumulate in fewer bits than float32, which is faster."""

    output: bool = True
    gradient: bool = False


FAST: dict[FastAccum, Fast] = {
    "forward": Fast(),  # as in torchao
    "always": Fast(gradient=True),
    "never": Fast(output=False),
}
"""These products by the setting `train.fp8_fast_accum`."""


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [rows, features] in float8, and the scale to multiply each row by [rows, 1], float32."""
    wide = x.float()
    most = wide.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    # Rounded up to a power of two, so that no value exceeds LARGEST: float8_e4m3fn would turn it into NaN.
    scale = torch.exp2(torch.ceil(torch.log2(most / LARGEST)))
    return (wide / scale).to(E4M3), scale


def multiply(
    a: Tensor,
    of_a: Tensor,
    b: Tensor,
    of_b: Tensor,
    dtype: torch.dtype,
    fast: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """Return ``a @ b.T + bias`` in `dtype`.

    a, b: float8 [rows, in] and [columns, in].
    of_a, of_b: their scales, float32 [rows, 1] and [columns, 1].
    fast: whether GPUs may accumulate in lower precision than float32.
    bias: [columns], in `dtype`; None for none.
    """
    columns = b.contiguous().t()
    scales = {"scale_a": of_a, "scale_b": of_b.t()}
    return torch._scaled_mm(a, columns, **scales, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def product(x: Tensor, weight: Tensor, fast: bool, bias: Tensor | None = None) -> Tensor:
    """Return ``linear(x, weight, bias)`` multiplied in float8.

    x [..., in], weight [out, in], bias [out] -> [..., out] in the dtype of x. Not differentiable.
    """
    y = multiply(*scaled_rows(x.flatten(0, -2)), *scaled_rows(weight), x.dtype, fast, bias)
    return y.unflatten(0, x.shape[:-1])


def refuse_small(config: ModelConfig, min_features: int) -> None:
    """Raise RecipeError if no linear layer of the blocks of `config` is large enough to multiply in float8."""
    products = [
        part.product for layer in config.block_kinds for part in layer.parts if part.product and not part.adapts
    ]
    if not any(multiplies_in_float8(*sizes, min_features) for sizes in products):
        raise RecipeError(
            f"train.precision is fp8, but no linear layer in the blocks of {config.name} reaches "
            f"train.fp8_min_features {min_features}: use bf16, which is faster for so small products, or set it lower"
        )


def float8_fault(device: torch.device) -> str | None:
    """Return the reason why `device` cannot multiply in float8, None if a small product works."""
    x = torch.ones(PROBE, PROBE, dtype=torch.bfloat16, device=device)
    try:
        product(x, x, fast=True)
    except RuntimeError as error:  # a GPU, or a build of torch, that cannot
        return f"this {device.type} device cannot multiply in float8 ({str(error).splitlines()[0]})"
    return None
