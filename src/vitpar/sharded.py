"""This rank's part of a tensor that a plan splits over ranks (a DTensor), and where it lies in the whole.

A plain tensor is its own part, the whole.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor as a plain tensor, differentiably; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor as a plain tensor sharing its memory; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def sharded_as(parameter: Tensor, shard: Tensor) -> Tensor:
    """The tensor whose part on this rank is `shard`, in the layout of `parameter`, sharing its memory."""
    if not isinstance(parameter, DTensor):
        return shard
    # Not DTensor.from_local: that copies an offloaded shard to the mesh's device.
    return DTensor(shard, parameter._spec, requires_grad=False)


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where in the whole tensor this rank's part of it begins, and the part's shape."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # as DCP asks for it
    return tuple(chunk.offsets), tuple(chunk.sizes)
