"""Collectives that autograd goes through, as functions of a tensor and a process group.

Each names its effect forward and backward as placements over the group's ranks. They are PyTorch's functional
collectives, which the compiler and selective checkpointing know, on plain tensors: dispatching on DTensors costs more
host time than small layers compute.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitpar.parallel import float8

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks. No autograd."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """The ranks' tensors behind each other along `dim`. No autograd."""
    if group.size() == 1:
        return x
    whole = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
    return whole if dim == 0 else torch.cat(whole.chunk(group.size()), dim=dim)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's part along `dim` of the sum over the ranks. No autograd."""
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
    """A replicated activation into a region where each rank computes a part: Replicate -> Replicate, the gradient
    Partial -> Replicate."""
    return _CopyToTPRegion.apply(x, group)


class _ReduceFromTPRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def reduce_from_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Partial sums out of such a region: Partial -> Replicate, the gradient Replicate -> Replicate."""
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
    """Partial sums to the rows (dim 0) of their total: Partial -> Shard(0), the gradient Shard(0) -> Replicate."""
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
    """Parts to a replicated whole that every rank goes on with in the same way: Shard(dim) -> Replicate, the gradient
    Replicate -> Shard(dim)."""
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
    """A replicated whole to this rank's part: Replicate -> Shard(dim), the gradient Shard(dim) -> Replicate."""
    return _ScatterToTPRegion.apply(x, dim, group)


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dim: int, group: ProcessGroup, in_float8: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.in_float8 = dim, group, in_float8
        ctx.save_for_backward(x, weight)
        whole = all_gather(x, dim, group)
        return float8.product(whole, weight) if in_float8 else torch.nn.functional.linear(whole, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        for_x = for_weight = None
        if ctx.needs_input_grad[1]:
            whole = all_gather(x, ctx.dim, ctx.group)
            for_weight = gradient.flatten(0, -2).mT @ whole.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            partial = float8.product(gradient, weight.t(), fast=False) if ctx.in_float8 else gradient @ weight
            for_x = reduce_scatter(partial, ctx.dim, ctx.group)
        return for_x, for_weight, None, None, None


def gathered_linear(x: Tensor, weight: Tensor, dim: int, group: ProcessGroup, in_float8: bool = False) -> Tensor:
    """``linear(all_gather(x, dim), weight)`` that keeps only this rank's part of x for backward and gathers it again.

    x: [..., in / n] or [rows / n, ..., in], parts along `dim`. weight: [out, in], the ranks' own or the same.
    The gradient of x is Partial -> Shard(dim). in_float8: as ``vitpar.parallel.float8`` multiplies.
    """
    return _GatheredLinear.apply(x, weight, dim, group, in_float8)


class _SplitNorm(torch.autograd.Function):
    """Mean and variance over features that `group` splits: forward one sum of two numbers a token, backward another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: ProcessGroup) -> Tensor:
        width = x.shape[-1] * group.size()
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        mean = all_reduce(wide.sum(-1, keepdim=True), group) / width
        centred = wide - mean
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
        sums = torch.cat([wide.sum(-1, keepdim=True), (wide * normal).sum(-1, keepdim=True)], dim=-1)
        first, second = (all_reduce(sums, ctx.group) / ctx.width).split(1, dim=-1)
        return ((wide - first - normal * second) * scale).to(gradient.dtype), None, None


def split_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, group: ProcessGroup) -> Tensor:
    """``layer_norm`` of x [..., features / n] whose features are split over `group`, as are weight and bias.

    Two small sums forward, the second of the centred squares (as exact as the whole norm), and one backward.
    """
    return _SplitNorm.apply(x, eps, group) * weight + bias
