"""Random numbers keyed by sample, not by rank: a counter-based hash in plain tensor arithmetic.

Every sample has a 63-bit key made from (seed, epoch, sample index). Drop-path and dropout hash the key with their place
in the model. So a sample drops the same elements under any plan, on any device, and when a checkpointed block is
recomputed. The hash is the finaliser of splitmix64 (Steele, Lea, Flood 2014) in wrapping int64 arithmetic.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, library

# splitmix64's constants as signed numbers: torch has little arithmetic for uint64, and int64 wraps to the same bits.
GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix(x: Tensor) -> Tensor:
    """Return splitmix64's finaliser of `x`: a bijection of int64 that maps neighbouring values to unrelated ones."""
    # >> of int64 copies the sign bit; the masks make it the logical shift that splitmix64 needs.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


# upstream: the compiler repeats the operations of a value at each of its uses. Without these copies, compiling would
# take twice as long for every shift in a hash: minutes for hashes of hashes.
@library.custom_op("vitpar::copied", mutates_args=())
def _copied(x: Tensor) -> Tensor:
    return x.clone()


@_copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keyed_uniform(keys: Tensor, shape: Sequence[int], first: int = 0) -> Tensor:
    """Return uniform numbers in [0, 1), float32 [batch, *shape], which depend only on key and index.

    keys: int64 [batch].
    first: offset of this rank's slice in the global last dim, so that sharded features get the global numbers.
    """
    # Open to the compiler, which computes the numbers of elements in the kernel that uses them. As one operation, the
    # 64-bit integers of a block's dropout would take 240 passes over tokens x width on a GPU.
    x, starts = mix(keys), [0] * len(shape[:-1]) + [first] * len(shape[-1:])
    for size, start in zip(shape, starts, strict=True):
        rows = _copied(x) if torch.compiler.is_compiling() else x
        # upstream: the compiler makes an index and its product with a constant one expression of 32 bits. The mask,
        # which keeps all bits, ends the index.
        indices = torch.arange(start + 1, start + size + 1, device=keys.device) & 0x7FFFFFFFFFFFFFFF
        x = mix(rows.unsqueeze(-1) + indices * GOLDEN)
    return (x & 0xFFFFFF).float() * 2.0**-24  # 24 bits: float32 represents each of them exactly


def at_place(keys: Tensor, place: Tensor) -> Tensor:
    """Return `keys`, int64 [batch], for one use of randomness in the model, which has the number `place` (0-dim)."""
    return keys + place * GOLDEN


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
