"""Random numbers that belong to a sample, not to a rank: a counter-based hash in plain tensor arithmetic.

Every sample carries a 63-bit key made from (seed, epoch, sample index). Drop-path and dropout hash that key with the
place in the model, so that the same sample drops the same things under any plan, on any device, and again when a
checkpointed block is recomputed. The mixer is splitmix64's finaliser (Steele, Lea, Flood 2014), in wrapping int64
arithmetic.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, library

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number, likewise the next two
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(x: Tensor) -> Tensor:
    """A bijection of int64 that turns neighbouring values into unrelated ones."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1  # the masks make >> a logical shift
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@library.custom_op("vitpar::keyed_uniform", mutates_args=())
def keyed_uniform(keys: Tensor, shape: Sequence[int], first: int = 0) -> Tensor:
    """Uniform numbers in [0, 1), one tensor of `shape` for every key.

    keys: int64 [batch]. first: where this slice of the last dim begins in the whole. Returns float32 [batch, *shape],
    a function of (key, index) alone. One operation to the compiler, which would else take minutes over the chain of
    integer arithmetic.
    """
    x = _mix(keys)
    starts = [0] * len(shape[:-1]) + [first] * len(shape[-1:])
    for size, start in zip(shape, starts, strict=True):
        x = _mix(x.unsqueeze(-1) + torch.arange(start + 1, start + size + 1, device=keys.device) * _GOLDEN)
    return (x & 0xFFFFFF).float() * 2.0**-24


@keyed_uniform.register_fake
def _(keys: Tensor, shape: Sequence[int], first: int = 0) -> Tensor:
    return keys.new_empty((*keys.shape, *shape), dtype=torch.float32)


def at_place(keys: Tensor, place: Tensor) -> Tensor:
    """Keys for one use of randomness in the model: unlike places give unrelated numbers.

    keys: int64 [batch]. place: int64, 0-dim.
    """
    return keys + place * _GOLDEN


def drop(x: Tensor, keys: Tensor, rate: Tensor | float, *, whole_sample: bool, first_feature: int = 0) -> Tensor:
    """Zero parts of `x` with probability `rate` and scale the rest by 1 / (1 - rate).

    x: [batch, tokens, features]. keys: int64 [batch]. whole_sample: drop a sample's whole tensor (drop-path), else
    single elements (dropout). first_feature: where the features here begin among all of the token's.
    """
    keep = keyed_uniform(keys, [] if whole_sample else list(x.shape[1:]), first_feature) >= rate
    keep = keep.view(-1, *(1,) * (x.dim() - 1)) if whole_sample else keep
    return x * keep.to(x.dtype) / (1.0 - rate)
