"""This rank's shard of a DTensor, and its place in the global tensor.

A plain tensor counts as one shard, which is the global tensor.
"""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor as a plain tensor, differentiably; a plain tensor unchanged."""
    # upstream: without grad_placements the gradient gets the parameter's placements and is never reduced over ranks
    # (torchtitan#1805, #2416, #2532). vitpar.parallel.tensor.TensorSums reduces what is partial.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor as a plain tensor that shares its memory; a plain tensor unchanged."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_as(parameter: Tensor, shard: Tensor) -> Tensor:
    """Return the tensor in the layout of `parameter` whose local shard is `shard`, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return shard
    # Not DTensor.from_local, which copies an offloaded shard to the mesh's device.
    return DTensor(shard, parameter._spec, requires_grad=False)


def mean_sharded_as(parameter: Tensor, shard: Tensor, dim: int) -> Tensor:
    """Return the tensor of size 1 in `dim`, else in the layout of `parameter`, whose local shard is `shard`.

    It shares memory. Ranks that differ only in their part of `dim` hold equal shards.
    """
    if not isinstance(parameter, DTensor):
        return shard
    spec, whole = parameter._spec, list(parameter.shape)
    whole[dim] = 1
    placements = tuple(Replicate() if splits(one, dim % parameter.dim()) else one for one in spec.placements)
    assert spec.tensor_meta is not None, "a parameter has a shape"
    like = torch.empty(whole, device="meta")
    meta = spec.tensor_meta._replace(shape=like.shape, stride=like.stride(), dtype=shard.dtype)
    return DTensor(shard, type(spec)(spec.mesh, placements, tensor_meta=meta), requires_grad=False)


def splits(placement: Placement, dim: int) -> bool:
    """Return whether a placement splits the dim `dim`, from 0."""
    # Not is_shard(), which is false for strided shards.
    return not placement.is_replicate() and cast(Shard, placement).dim == dim


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the offsets of this rank's shard in the global tensor, and the shard's shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # the method that torch.distributed.checkpoint uses
    return tuple(chunk.offsets), tuple(chunk.sizes)
