"""Differentiable collectives: functions of a plain tensor and a process group, after Megatron's f and g.

Each docstring gives the placements over the group's ranks, of the activation in forward and of its gradient in
backward. The functions call PyTorch's functional collectives, which torch.compile and selective checkpointing know.
They take plain tensors, because dispatching on DTensors costs more host time than small layers take to compute.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitpar.models.compiled import wide

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, group: ProcessGroup, operation: str = "sum") -> Tensor:
    """Return the sum over the ranks, or with another `operation` the max or min. Not differentiable."""
    return finish(start_all_reduce(x, group, operation), group)


def all_gather(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated along `dim`, in rank order. Not differentiable."""
    return finish_all_gather(start_all_gather(x, group), dim, group)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along `dim` of the sum over the ranks. Not differentiable."""
    return finish(start_reduce_scatter(x, dim, group), group)


# A collective that was started returns the tensor of its result, which has no values before it is finished. Whatever is
# computed in between overlaps with the communication, in eager mode: the compiler may move either of them.


def start_all_reduce(x: Tensor, group: ProcessGroup, operation: str = "sum") -> Tensor:
    """Start the sum over the ranks, or another `operation`."""
    return x if group.size() == 1 else _ops.all_reduce(x.contiguous(), operation, group.group_name)


def start_all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to gather the ranks' tensors, for `finish_all_gather`."""
    return x if group.size() == 1 else _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Start to sum over the ranks, for this rank's part along `dim`."""
    if group.size() == 1:
        return x
    stacked = x.contiguous() if dim == 0 else torch.cat(x.chunk(group.size(), dim=dim))
    return _ops.reduce_scatter_tensor(stacked, "sum", group.size(), group.group_name)


def finish(started: Tensor, group: ProcessGroup) -> Tensor:
    """Return the result of a started sum."""
    return started if group.size() == 1 else _ops.wait_tensor(started)


def finish_all_gather(started: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the gathered tensors concatenated along `dim`, in rank order."""
    whole = finish(started, group)
    return whole if dim == 0 or group.size() == 1 else torch.cat(whole.chunk(group.size()), dim=dim)


def _kept(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x


def _summed(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return all_reduce(x, group)


def _part(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


class _Region(torch.autograd.Function):
    """One function of (tensor, dim, group) in forward, and another one of the gradient in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dim: int,
        group: ProcessGroup,
        forward: Callable[..., Tensor],
        backward: Callable[..., Tensor],
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.exchange = dim, group, backward
        return forward(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.exchange(gradient, ctx.dim, ctx.group), None, None, None, None


def reduce_from_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the all-reduced sum of `x` (Megatron's g).

    Forward Partial -> Replicate, backward Replicate -> Replicate. The gradient needs no collective: every rank computes
    the same with the sum.
    """
    return _Region.apply(x, 0, group, _summed, _kept)


def reduce_scatter_to_tp_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's rows (dim 0) of the summed `x`.

    Forward Partial -> Shard(0), backward Shard(0) -> Replicate (all-gather).
    """
    return _Region.apply(x, 0, group, reduce_scatter, all_gather)


def gather_from_tp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return the ranks' tensors concatenated along `dim`, for computation that is the same on every rank.

    Forward Shard(dim) -> Replicate, backward Replicate -> Shard(dim). Backward only slices, so it is wrong where ranks
    compute different parts with the result: there the gradient is Partial (`gathered_linear`).
    """
    return _Region.apply(x, dim, group, all_gather, _part)


def scatter_to_tp_region(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part of a replicated tensor along `dim`.

    Forward Replicate -> Shard(dim), backward Shard(dim) -> Replicate (all-gather).
    """
    return _Region.apply(x, dim, group, _part, all_gather)


class _SplitNorm(torch.autograd.Function):
    """Normalization over features that `group` splits, without weight and bias.

    centres: whether the mean is subtracted, as in LayerNorm; not in RMSNorm.

    Forward all-reduces one number per token, and before it another one for the mean. Backward all-reduces one or two
    numbers per token in one message.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, group: ProcessGroup, centres: bool) -> Tensor:
        width, numbers = x.shape[-1] * group.size(), x.to(wide(x))
        mean = all_reduce(numbers.sum(-1, keepdim=True), group) / width if centres else None
        # Centred squares, although they need a second all-reduce: E[x^2] - E[x]^2 cancels where the mean is large.
        centred = numbers if mean is None else numbers - mean
        scale = torch.rsqrt(all_reduce(centred.square().sum(-1, keepdim=True), group) / width + eps)
        ctx.group, ctx.width = group, width
        ctx.save_for_backward(x, scale, *([] if mean is None else [mean]))
        return (centred * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, scale, *mean = ctx.saved_tensors
        centred, wide = x.to(scale.dtype), gradient.to(scale.dtype)
        normal = (centred - mean[0] if mean else centred) * scale
        sums = (wide * normal).sum(-1, keepdim=True)
        if mean:
            sums = torch.cat([wide.sum(-1, keepdim=True), sums], dim=-1)
        means = all_reduce(sums, ctx.group) / ctx.width
        if mean:
            wide = wide - means[..., :1]
        return ((wide - normal * means[..., -1:]) * scale).to(gradient.dtype), None, None, None


def split_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, group: ProcessGroup) -> Tensor:
    """Return ``layer_norm`` of `x`, or ``rms_norm`` without bias. Features, weight and bias are sharded over `group`.

    x: [..., features / n]; the result has the same shape. weight, bias: [features / n].
    Only statistics are communicated: DTensor's ``layer_norm`` would all-gather the features.
    """
    y = _SplitNorm.apply(x, eps, group, bias is not None) * weight
    return y if bias is None else y + bias
