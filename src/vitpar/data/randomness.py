"""Random numbers as pure functions of (seed, epoch, sample, repeat), never of a rank, a worker or a plan.

All of it is 64-bit integer arithmetic with splitmix64's finaliser (Steele, Lea, Flood 2014), so that the numbers are
the same on every machine and with every version of numpy and torch.
"""

import math

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_DRAWS = 0xD1342543DE82EF95  # odd: sets Draws apart from other uses of a key, which count on from the key itself


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that turns neighbouring numbers into unrelated ones. `x`: uint64 of any shape but a scalar."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def hash_numbers(*columns: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """One 64-bit hash for each row of `columns` (integers and int64 arrays of one length): uint64 [rows]."""
    state = np.zeros(1, dtype=np.uint64)
    for column in columns:
        numbers = np.atleast_1d(np.asarray(column, dtype=np.int64)).view(np.uint64)
        state = mix((state ^ numbers) + np.uint64(_GOLDEN))
    return state


def sample_keys(
    seed: int, epochs: NDArray[np.int64], samples: NDArray[np.int64], repeats: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The random key, 63 bits, of every (epoch, sample, repeat). Arguments and what is returned: int64 [n]."""
    return (hash_numbers(seed, epochs, samples, repeats) >> np.uint64(1)).view(np.int64)


def uniforms(keys: NDArray[np.int64], *which: int) -> NDArray[np.float64]:
    """The number `which` of every key, uniform in [0, 1): float64 [n]. keys: int64 [n]."""
    return (hash_numbers(keys, *which) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def betas(keys: NDArray[np.int64], alpha: float, which: int) -> NDArray[np.float64]:
    """The same of Beta(alpha, alpha), alpha > 0."""
    one, other = (_gammas(keys, alpha, 2 * which + part) for part in (0, 1))
    return np.divide(one, one + other, out=np.full(len(keys), 0.5), where=one + other > 0)


def _gammas(keys: NDArray[np.int64], shape: float, which: int) -> NDArray[np.float64]:
    """The same of Gamma(shape, 1) (Marsaglia and Tsang 2000)."""
    boost = np.ones(len(keys))
    if shape < 1:
        boost, shape = (1 - uniforms(keys, which, 0)) ** (1 / shape), shape + 1
    d = shape - 1 / 3
    found, rest, turn = np.empty(len(keys)), np.arange(len(keys)), 0
    while len(rest):
        turn += 1
        radius, angle, level = (uniforms(keys[rest], which, turn, part) for part in range(3))
        x = np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)
        v = np.maximum(1 + x / math.sqrt(9 * d), 1e-300) ** 3
        taken = (v > 1e-300) & (np.log(1 - level) < x * x / 2 + d - d * v + d * np.log(np.maximum(v, 1e-300)))
        found[rest[taken]] = d * v[taken]
        rest = rest[~taken]
    return found * boost


class Draws:
    """The stream of random numbers of one sample, from its key. Cheap to make, which counts for small images."""

    __slots__ = ("_state",)

    def __init__(self, key: int) -> None:
        self._state = (key * _DRAWS) & _MASK

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """The next number, uniform in [low, high)."""
        self._state = x = (self._state + _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
        x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
        return low + (high - low) * (((x ^ (x >> 31)) >> 11) * 2.0**-53)

    def below(self, bound: int) -> int:
        """The next integer, uniform in [0, bound)."""
        return int(self.uniform() * bound)

    def normal(self) -> float:
        """The next number of a standard normal distribution (Box and Muller 1958)."""
        return math.sqrt(-2 * math.log(1 - self.uniform())) * math.cos(2 * math.pi * self.uniform())

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """The next `count` bytes, uint8 [count]."""
        first = int(self.uniform() * 2**53)
        words = mix(np.uint64(first) + np.arange(-(-count // 8), dtype=np.uint64) * np.uint64(_GOLDEN))
        return words.astype("<u8").view(np.uint8)[:count]
