"""Random numbers keyed by sample, not by rank: a counter-based hash in plain tensor arithmetic.

Every sample has a 63-bit key made from (seed, epoch, sample index). Drop-path and dropout hash the key with their place
in the model. So a sample drops the same elements under any plan, on any device, and when a checkpointed block is
recomputed. The hash is the finaliser of splitmix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, library

# splitmix64's constants as signed numbers: torch has little arithmetic for uint64, and int64 wraps to the same bits.
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """Return splitmix64's finaliser of `x`: a bijection of int64 that maps neighbouring values to unrelated ones."""
    # >> of int64 copies the sign bit; the masks make it the logical shift that splitmix64 needs.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def keyed_uniform(keys: Tensor, shape: Sequence[int], first: int = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float32 [batch, *shape], which depend only on key and index.

    keys: int64 [batch].
    first: offset of this rank's slice in the global last dim, so that sharded features get the global numbers.
    """
    # The compiler makes one number a sample a part of other kernels. Opaque, it is 13 tiny kernels a branch on a GPU.
    if not shape and keys.device.type != "cpu":
        return _uniform(keys, shape, first)
    return _opaque_uniform(keys, shape, first)


def _uniform(keys: Tensor, shape: Sequence[int], first: int) -> Tensor:
    x = _mix(keys)
    starts = [0] * len(shape[:-1]) + [first] * len(shape[-1:])
    for size, start in zip(shape, starts, strict=True):
        x = _mix(x.unsqueeze(-1) + torch.arange(start + 1, start + size + 1, device=keys.device) * _GOLDEN)
    return (x & 0xFFFFFF).float() * 2.0**-24  # 24 bits: float32 represents each of them exactly


# For the compiler, one operation: it would take minutes for the arithmetic on every element of an activation.
_opaque_uniform = library.custom_op("vitpar::keyed_uniform", mutates_args=())(_uniform)


@_opaque_uniform.register_fake
def _(keys: Tensor, shape: Sequence[int], first: int) -> Tensor:
    return keys.new_empty((*keys.shape, *shape), dtype=torch.float32)


def at_place(keys: Tensor, place: Tensor) -> Tensor:
    """Return the keys for one use of randomness in the model; different places give unrelated numbers.

    keys: int64 [batch], keys of the samples.
    place: int64, 0-dim, number of the use.
    """
    return keys + place * _GOLDEN


def drop(x: Tensor, keys: Tensor, rate: Tensor | float, *, whole_sample: bool, first_feature: int = 0) -> Tensor:
    """Zero parts of `x` with probability `rate` and scale the rest by 1 / (1 - rate).

    x: [batch, tokens, features].
    keys: int64 [batch].
    whole_sample: True drops a sample's complete tensor (drop-path), False single elements (dropout).
    first_feature: offset of this rank's features among all features of a token.
    """
    if whole_sample:
        keep = keeps_sample(keys, rate).view(-1, *(1,) * (x.dim() - 1))
    else:
        keep = keyed_uniform(keys, list(x.shape[1:]), first_feature) >= rate
    return x * keep.to(x.dtype) / (1.0 - rate)


def keeps_sample(keys: Tensor, rate: Tensor | float) -> Tensor:
    """Return whether drop-path keeps each sample: bool [batch]. keys: int64 [batch]."""
    return keyed_uniform(keys, []) >= rate
