"""Differentiable collectives: functions of a plain tensor and a process group, after Megatron's f and g.

Each docstring gives the placements over the group's ranks, of the activation in forward and of its gradient in
backward. The functions call PyTorch's functional collectives, which torch.compile and selective checkpointing know.
They take plain tensors, because dispatching on DTensors costs more host time than small layers take to compute.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitpar.parallel import float8

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over the ranks. Not differentiable."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated along `dim`, in rank order. Not differentiable."""
    if group.size() == 1:
        return x
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return whole if dim == 0 else torch.cat(whole.chunk(group.size()), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over the ranks. Not differentiable."""
    if group.size() == 1:
        return x
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim=dim))
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name))


class _CopyToTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


def copy_to_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return `x` unchanged and all-reduce its gradient (Megatron's f): each rank computes a different part with `x`.

    Forward Replicate -> Replicate, backward Partial -> Replicate.
    """
    return _CopyToTPRegion.apply(x, group)


class _ReduceFromTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def reduce_from_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the all-reduced sum of `x` (Megatron's g).

    Forward Partial -> Replicate, backward Replicate -> Replicate. The gradient needs no collective: every rank computes
    the same with the sum.
    """
    return _ReduceFromTPRegion.apply(x, group)


class _ReduceScatterToTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, 0, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, 0, ctx.group), None


def reduce_scatter_to_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's rows (dim 0) of the summed `x`.

    Forward Partial -> Shard(0), backward Shard(0) -> Replicate (all-gather).
    """
    return _ReduceScatterToTPRegion.apply(x, group)


class _GatherFromTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        mine = gradient.chunk(ctx.group.size(), dim=ctx.dim)[ctx.group.rank()]
        return mine.contiguous(), None, None


def gather_from_tp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated along `dim`, for computation that is the same on every rank.

    Forward Shard(dim) -> Replicate, backward Replicate -> Shard(dim). Backward only slices, so it is wrong where ranks
    compute different parts with the result: there the gradient is Partial (`gathered_linear`).
    """
    return _GatherFromTPRegion.apply(x, dim, group)


class _ScatterToTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, ctx.dim, ctx.group), None, None


def scatter_to_tp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part of a replicated tensor along `dim`.

    Forward Replicate -> Shard(dim), backward Shard(dim) -> Replicate (all-gather).
    """
    return _ScatterToTPRegion.apply(x, dim, group)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int, group: ProcessGroup, in_float8: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.in_float8 = dim, group, in_float8
        # Save this rank's part, not the gathered tensor, which takes group.size() times the memory.
        ctx.save_for_backward(x, weight)
        whole = all_gather(x, dim, group)
        return float8.product(whole, weight) if in_float8 else torch.nn.functional.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        for_x = for_weight = None
        if ctx.needs_input_grad[1]:
            whole = all_gather(x, ctx.dim, ctx.group)
            # Not in float8 either way: the sum over all tokens loses the most precision (vitpar.parallel.float8).
            for_weight = gradient.flatten(0, -2).mT @ whole.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            partial = float8.product(gradient, weight.t(), fast=False) if ctx.in_float8 else gradient @ weight
            for_x = reduce_scatter(partial, ctx.dim, ctx.group)
        return for_x, for_weight, None, None, None


def gathered_linear(x: Tensor, weight: Tensor, dim: int, group: ProcessGroup, in_float8: bool = False) -> Tensor:
    """Return ``linear(all_gather(x, dim), weight)``; backward gathers `x` again instead of keeping the gathered tensor.

    x: this rank's part along `dim`, [..., in / n] or [rows / n, ..., in].
    weight: this rank's weight [out, in].
    in_float8: whether to multiply in float8 (``vitpar.parallel.float8``).
    Backward reduce-scatters the gradient of `x`, Partial -> Shard(dim), as each rank's weight contributes to all of it.
    """
    return _GatheredLinear.apply(x, weight, dim, group, in_float8)


def _wide(x: Tensor) -> Tensor:
    """Return `x` in at least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class _SplitNorm(torch.autograd.Function):
    """Normalization over features that `group` splits, without weight and bias.

    Forward all-reduces one number per token twice, backward two numbers per token once.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        width, wide = x.shape[-1] * group.size(), _wide(x)
        mean = all_reduce(wide.sum(-1, keepdim=True), group) / width
        centred = wide - mean
        # Centred squares, although they need a second all-reduce: E[x^2] - E[x]^2 cancels where the mean is large.
        variance = all_reduce(centred.square().sum(-1, keepdim=True), group) / width
        scale = torch.rsqrt(variance + eps)
        ctx.group, ctx.width = group, width
        ctx.save_for_backward(x, mean, scale)
        return (centred * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, mean, scale = ctx.saved_tensors
        normal = (x.to(mean.dtype) - mean) * scale
        wide = gradient.to(mean.dtype)
        # Both sums of the LayerNorm gradient in one message.
        sums = torch.cat([wide.sum(-1, keepdim=True), (wide * normal).sum(-1, keepdim=True)], dim=-1)
        first, second = (all_reduce(sums, ctx.group) / ctx.width).split(1, dim=-1)
        return ((wide - first - normal * second) * scale).to(gradient.dtype), None, None


def split_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    """Return ``layer_norm`` of `x`, whose features are sharded over `group`, as are weight and bias.

    x: [..., features / n]; the result has the same shape. weight, bias: [features / n].
    Only statistics are communicated: DTensor's ``layer_norm`` would all-gather the features.
    """
    return _SplitNorm.apply(x, eps, group) * weight + bias


class _SplitRMSNorm(torch.autograd.Function):
    """Division by the root mean square of features that `group` splits, without weight.

    Forward and backward all-reduce one number per token each.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        width, wide = x.shape[-1] * group.size(), _wide(x)
        scale = torch.rsqrt(all_reduce(wide.square().sum(-1, keepdim=True), group) / width + eps)
        ctx.group, ctx.width = group, width
        ctx.save_for_backward(x, scale)
        return (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, scale = ctx.saved_tensors
        normal, wide = x.to(scale.dtype) * scale, gradient.to(scale.dtype)
        along = all_reduce((wide * normal).sum(-1, keepdim=True), ctx.group) / ctx.width
        return ((wide - normal * along) * scale).to(gradient.dtype), None, None


def split_rms_norm(x: Tensor, weight: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    """Return ``rms_norm`` of `x`, whose features are sharded over `group`, as is the weight.

    x: [..., features / n]; the result has the same shape. weight: [features / n].
    """
    return _SplitRMSNorm.apply(x, eps, group) * weight
