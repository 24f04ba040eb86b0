"""Attention from the output of one linear layer, by the kernel of ``vitpar.kernels.attention`` where a run chose it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_used = False


def use_packed_attention(used: bool) -> bool:
    """Choose whether blocks of this process that can compute attention so in training do. Return the choice before."""
    global _used
    before, _used = _used, used
    return before


def packs_attention() -> bool:
    """Return whether attention is computed so here: it is chosen, and a step is trained."""
    return _used and torch.is_grad_enabled() and not torch.compiler._is_exporting_flag


@torch.library.custom_op("vitpar::packed_attention", mutates_args=())
def _forward(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    from vitpar.kernels.attention import forward

    return forward(qkv.contiguous(), heads)


@_forward.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    return qkv.new_empty(batch, tokens, width // 3), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


PACKED_ATTENTION = torch.ops.vitpar.packed_attention.default
"""Operation of the forward."""


@torch.library.custom_op("vitpar::packed_attention_backward", mutates_args=())
def _backward(gradient: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    from vitpar.kernels.attention import backward

    packed, sums = backward(gradient.contiguous(), qkv.contiguous(), out.contiguous(), logs)
    return packed, sums.sum(0)


@_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), qkv.new_empty(qkv.shape[2], dtype=torch.float32)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None, heads: int) -> Tensor:
        out, logs = _forward(qkv, heads)
        ctx.save_for_backward(qkv, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        packed, sums = _backward(gradient, *ctx.saved_tensors)
        return packed, sums.to(packed.dtype) if ctx.needs_input_grad[1] else None, None


def attend_packed(qkv: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    """Return the outputs of all heads: [batch, tokens, heads · head_dim].

    qkv: 16-bit, [batch, tokens, heads · 3 · head_dim], ordered (head, q|k|v, feature).
    bias: that of the linear layer that gave `qkv` and left it out of its own gradients; it receives the sums over the
        gradient of `qkv`. None for no bias, or one that the linear layer differentiates.
    """
    out: Tensor = _Packed.apply(qkv, bias, qkv.shape[2] // (3 * head_dim))
    return out
