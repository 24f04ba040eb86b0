"""Parts of a block that compute differently where a compiler traces a training step, so that GPUs move fewer bytes.

The results are those of the plain formulas up to rounding. What is saved is counted in passes: reads or writes of one
activation of tokens x width (experiments/dry_bench.py). Nothing here is used uncompiled, exported or in evaluation,
but attention from the output of one linear layer, by the kernel of ``vitpar.kernels.attention`` where a run chose it.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def trains_compiled() -> bool:
    """Return whether a compiler traces a training step."""
    # upstream: pytorch#176347. Before torch 2.13 the compiler takes `is_exporting()` for True in every graph that it
    # traces, so this reads what that function returns.
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag and torch.is_grad_enabled()


def is_plain(linear: nn.Linear) -> bool:
    """Return whether `linear` has a bias and torch's own forward: no adapter, not in float8, not split by a plan."""
    return linear.bias is not None and "forward" not in linear.__dict__ and not hasattr(linear, "lora_A")


def is_whole(linear: nn.Linear) -> bool:
    """Return whether `linear` has a bias, complete weights and no adapter, so that `multiply` computes it."""
    return is_plain(linear) or (
        linear.bias is not None and "multiply" in linear.__dict__ and not hasattr(linear, "lora_A")
    )


def multiply(linear: nn.Linear, x: Tensor, bias: Tensor) -> Tensor:
    """Return what `linear`, which `is_whole`, gives for `x` with another bias."""
    # Precision fp8 gives a module a function of its own (vitpar.parallel.linear).
    return linear.__dict__.get("multiply", F.linear)(x, linear.weight, bias)


def kept(operation: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """Return ``operation(*operands)``, which a compiled block keeps for backward. operation: one of torch's."""
    if not trains_compiled():
        return operation(*operands)
    result: Tensor = checkpoint(operation, *operands, use_reentrant=False, preserve_rng_state=False, context_fn=_KEEP)
    return result


def kept_sum(x: Tensor, branch: Tensor) -> Tensor:
    """Return ``x + branch``, kept for backward. It is the input of a norm that follows.

    The compiler would keep `branch` and add again in backward. The norm's backward would then read two tensors, and the
    sums for its weight and bias would join the kernels of the norm before, which also reads `x`: 4 of 56 passes over
    tokens x width a block on GPUs.
    """
    return kept(torch.add, x, branch)


def scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``x * scale`` in the data type of `x`. scale: factors, None for 1."""
    return x if scale is None else (x * scale).to(x.dtype)


def _must_save(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


_KEEP = functools.partial(create_selective_checkpoint_contexts, _must_save)

# upstream: the compiler warns of every `context_fn`, in case an operation writes in place. That of `kept` never does.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


def _gradients(
    needed: tuple[bool, ...], gradient: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight of a linear layer, each None if it is not needed."""
    for_x = gradient @ weight if needed[0] else None
    return for_x, gradient.flatten(0, -2).mT @ x.flatten(0, -2) if needed[1] else None


def wide(x: Tensor) -> torch.dtype:
    """Return the data type in which sums over `x` are accurate: float32, or its own where that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


class LinearBySample(torch.autograd.Function):
    """Linear layer whose gradient of the bias is summed over the tokens of each sample first, then over samples.

    That is in the kernel that computes the output's gradient, which needs sums over parts of the tokens.

    x: [batch, tokens, in] -> [batch, tokens, out].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        for_x, for_weight = _gradients(ctx.needs_input_grad, gradient, *ctx.saved_tensors)
        for_bias = None
        if ctx.needs_input_grad[2]:
            for_bias = gradient.sum(1, dtype=wide(gradient)).sum(0).to(gradient.dtype)
        return for_x, for_weight, for_bias


class _Heads(torch.autograd.Function):
    """Split into queries, keys and values of all heads, which also gives the bias before it its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = x.unflatten(-1, (-1, 3 * head_dim)).split(head_dim, dim=-1)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        # In four dimensions, as it is summed: the compiler joins copy and sum where their loops have the same sizes.
        packed = torch.cat(gradients, dim=-1)
        for_bias = None
        if ctx.needs_input_grad[1]:
            for_bias = packed.sum(1, dtype=wide(packed)).sum(0).flatten().to(packed.dtype)
        return packed.flatten(2), for_bias, None


def linear_heads(linear: nn.Linear, x: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values: the output of `linear`, which `is_whole`, split.

    One kernel of backward packs their gradients for the products and sums them for the bias. Otherwise a second one
    reads the packed gradients again: 3 of 48 passes.

    x: [batch, tokens, width] -> three of [batch, tokens, heads, head_dim]. The rows of the weight are ordered (head,
    q|k|v, feature).
    """
    return _Heads.apply(multiply(linear, x, linear.bias.detach()), linear.bias, head_dim)


def _sum_beside(x: Tensor, gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient of a bias, the sum of `gradient` times `scale` over all tokens.

    x: input of the norm whose backward adds to `gradient`. The compiler lets that kernel compute the sum if both read
    `x` as well, so this reads it, and looks for what is not a number, which no training survives.
    """
    terms = gradient if scale is None else gradient * scale
    return torch.where(x.isnan(), x, terms).sum((0, 1), dtype=wide(terms)).to(gradient.dtype)


class _BiasOfBranch(torch.autograd.Function):
    """Identity of the residual stream, whose gradient gives that of the bias at the end of a branch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale = ctx.saved_tensors
        return gradient, _sum_beside(x, gradient, scale) if ctx.needs_input_grad[1] else None, None


def sum_bias_of_branch(x: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return `x`, the residual that a branch is added to, and give `bias`, the branch's last, its gradient.

    The branch must leave `bias` out of its own gradients (``bias.detach()``). The gradient of the residual is that of
    the branch. It is summed in the backward of the norm that reads `x`, instead of in a kernel of its own: 1 pass.

    x: [batch, tokens, width]. bias: [width]. scale: factor of the branch, `wide` [batch, 1, 1], None for 1.
    """
    return _BiasOfBranch.apply(x, bias, scale)


# One operation that writes into its first argument: torch.addmm would copy it into its output first.
@library.custom_op("vitpar::add_product_", mutates_args=("total",))
def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to `total`."""
    total.addmm_(a, b)


@_add_product.register_fake
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    pass


class _AddLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, hidden, weight, scale)
        total = (x + (bias if scale is None else bias * scale)).to(x.dtype).view(-1, x.shape[-1])
        _add_product(total, hidden.flatten(0, 1), weight.t())
        return total.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, weight, scale = ctx.saved_tensors
        for_hidden, for_weight = _gradients(ctx.needs_input_grad[1:], gradient, hidden, weight)
        for_bias = _sum_beside(x, gradient, scale) if ctx.needs_input_grad[3] else None
        return gradient, for_hidden, for_weight, for_bias, None


def add_linear(x: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return ``x + scale * linear(hidden / scale, weight, bias)``: `hidden` is scaled already.

    The product accumulates onto ``x + scale * bias``, which the kernel of a norm before it writes: 2 passes less,
    1 of which the product reads more. The gradient of the bias is summed as in `sum_bias_of_branch`.

    x: [batch, tokens, width], of which a norm is computed. hidden: [batch, tokens, hidden]. weight: [width, hidden].
    bias: [width]. scale: `wide` [batch, 1, 1], None for 1.
    """
    return _AddLinear.apply(x, hidden, weight, bias, scale)


_used = False


def use_packed_attention(used: bool) -> bool:
    """Choose whether blocks of this process that can compute attention so in training do. Return the choice before."""
    global _used
    before, _used = _used, used
    return before


def packs_attention() -> bool:
    """Return whether attention is computed so here: it is chosen, and a step is trained."""
    return _used and torch.is_grad_enabled() and not torch.compiler._is_exporting_flag


@library.custom_op("vitpar::packed_attention", mutates_args=())
def _packed_forward(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    from vitpar.kernels.attention import forward

    return forward(qkv.contiguous(), heads)


@_packed_forward.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    return qkv.new_empty(batch, tokens, width // 3), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


PACKED_ATTENTION = torch.ops.vitpar.packed_attention.default
"""Operation of the forward."""


@library.custom_op("vitpar::packed_attention_backward", mutates_args=())
def _packed_backward(gradient: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    from vitpar.kernels.attention import backward

    packed, sums = backward(gradient.contiguous(), qkv.contiguous(), out.contiguous(), logs)
    return packed, sums.sum(0)


@_packed_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(qkv), qkv.new_empty(qkv.shape[2], dtype=torch.float32)


class _Packed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor | None, heads: int) -> Tensor:
        out, logs = _packed_forward(qkv, heads)
        ctx.save_for_backward(qkv, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        packed, sums = _packed_backward(gradient, *ctx.saved_tensors)
        return packed, sums.to(packed.dtype) if ctx.needs_input_grad[1] else None, None


def attend_packed(qkv: Tensor, bias: Tensor | None, head_dim: int) -> Tensor:
    """Return the outputs of all heads: [batch, tokens, heads · head_dim].

    qkv: 16-bit, [batch, tokens, heads · 3 · head_dim], ordered (head, q|k|v, feature).
    bias: that of the linear layer that gave `qkv` and left it out of its own gradients; it receives the sums over the
        gradient of `qkv`. None for no bias, or one that the linear layer differentiates.
    """
    out: Tensor = _Packed.apply(qkv, bias, qkv.shape[2] // (3 * head_dim))
    return out
