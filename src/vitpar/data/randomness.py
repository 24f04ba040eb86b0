"""Random numbers and the order of samples.

Both are pure functions of (seed, epoch, sample, repeat), and never depend on a rank, a worker or a plan. They use
64-bit integer arithmetic with the finaliser of splitmix64 (Steele, Lea, Flood 2014), so the numbers are the same on
every machine and with every version of numpy and torch.

Positions 0, 1, 2, … of the global order of training samples run through the epochs without a gap. Every sample
therefore occurs exactly once per epoch, and every batch is full; a batch may straddle two epochs. Any position can be
computed without those before it. The memory for that does not grow with the data set, because a shuffle is a keyed
permutation of numbers and not a list of them.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Odd, so that multiplying by it is a bijection. Separates the numbers of `Draws` from those of `uniforms` and `betas`,
# which hash the key itself.
_DRAWS = 0xD1342543DE82EF95
_SHUFFLE = 0x5F1E  # separates shuffles from sample keys, which hash the same numbers
_ROUNDS = 8  # of the Feistel network

Samples = NDArray[np.int64]
"""Numbers of samples, or of places in their order, int64 [n]."""


def _scrambled(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Map numbers bijectively so that neighbours become unrelated. x: uint64 of any shape but a scalar."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    return x ^ (x >> np.uint64(31))


def hash_numbers(*columns: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each row, uint64 [rows]. columns: integers, and int64 arrays of the same length."""
    state = np.zeros(1, dtype=np.uint64)
    for column in columns:
        numbers = np.atleast_1d(np.asarray(column, dtype=np.int64)).view(np.uint64)
        state = _scrambled((state ^ numbers) + np.uint64(_GOLDEN))
    return state


def sample_keys(
    seed: int, epochs: NDArray[np.int64], samples: NDArray[np.int64], repeats: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the 63-bit random key of every (epoch, sample, repeat). Arrays and result are int64 [n]."""
    return (hash_numbers(seed, epochs, samples, repeats) >> np.uint64(1)).view(np.int64)


def uniforms(keys: NDArray[np.int64], *which: NDArray[np.int64] | int) -> NDArray[np.float64]:
    """Return random number `which` of every key, uniform in [0, 1): float64 [n].

    keys: int64 [n]; or any shape, with which the arrays in `which` are broadcast.
    """
    return (hash_numbers(keys, *which) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def betas(keys: NDArray[np.int64], alpha: float, which: int) -> NDArray[np.float64]:
    """Return random number `which` of every key, distributed as Beta(alpha, alpha): float64 [n].

    keys: int64 [n].
    alpha: above 0.
    """
    one, other = (_gammas(keys, alpha, 2 * which + part) for part in (0, 1))
    return np.divide(one, one + other, out=np.full(len(keys), 0.5), where=one + other > 0)


def _gammas(keys: NDArray[np.int64], shape: float, which: int) -> NDArray[np.float64]:
    """Return random number `which` of every key, distributed as Gamma(shape, 1) (Marsaglia and Tsang 2000)."""
    boost = np.ones(len(keys))
    if shape < 1:
        boost, shape = (1 - uniforms(keys, which, 0)) ** (1 / shape), shape + 1
    d = shape - 1 / 3
    gammas, rest, turn = np.empty(len(keys)), np.arange(len(keys)), 0
    while len(rest):
        turn += 1
        radius, angle, level = (uniforms(keys[rest], which, turn, part) for part in range(3))
        x = np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)
        v = np.maximum(1 + x / math.sqrt(9 * d), 1e-300) ** 3
        taken = (v > 1e-300) & (np.log(1 - level) < x * x / 2 + d - d * v + d * np.log(np.maximum(v, 1e-300)))
        gammas[rest[taken]] = d * v[taken]
        rest = rest[~taken]
    return gammas * boost


class Draws:
    """Streams of random numbers of many samples, each derived from the sample's key. keys: int64 [n]."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self._states = keys.view(np.uint64) * np.uint64(_DRAWS)
        self._rows = np.arange(len(keys))

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, rows: NDArray[np.int64]) -> "Draws":
        """Return the streams of some samples, by their places among these. Drawing from them draws from these."""
        part = copy(self)
        part._rows = self._rows[rows]
        return part

    def uniform(self, low: Any = 0.0, high: Any = 1.0) -> NDArray[np.float64]:
        """Return the next number of each stream, uniform in [low, high)."""
        self._states[self._rows] = x = self._states[self._rows] + np.uint64(_GOLDEN)
        return low + (high - low) * ((_scrambled(x) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def below(self, bound: Any) -> NDArray[np.int64]:
        """Return the next integer of each stream, uniform in [0, bound)."""
        return (self.uniform() * bound).astype(np.int64)

    def normal(self) -> NDArray[np.float64]:
        """Return the next number of each stream of a standard normal distribution (Box and Muller 1958)."""
        # Python's logarithm and cosine: numpy's may differ in the last digit from one machine to another.
        pairs = zip((1 - self.uniform()).tolist(), self.uniform().tolist(), strict=True)
        return np.array([math.sqrt(-2 * math.log(one)) * math.cos(2 * math.pi * other) for one, other in pairs])

    def seeds(self) -> NDArray[np.int64]:
        """Return a number of 53 bits of each stream, int64 [n], from which random bytes are made."""
        return (self.uniform() * 2**53).astype(np.int64)


def shuffled(places: Samples, size: int, *key: int) -> Samples:
    """Return the numbers at `places` of a shuffle of 0 … size - 1, int64 [n].

    The shuffle is a Feistel network over the bits of a place (Luby and Rackoff 1988), applied repeatedly until the
    result is below `size` (cycle walking, Black and Rogaway 2002).

    places: int64 [n], each from 0 to size - 1.
    key: integers that select the shuffle.
    """
    low = np.uint64(max(1, (size - 1).bit_length() // 2))
    high = np.uint64(max(1, (size - 1).bit_length() - int(low)))
    widths, one = (high, low), np.uint64(1)
    keys = hash_numbers(_SHUFFLE, *key, np.arange(_ROUNDS))
    permuted = places.astype(np.uint64)
    rest = np.arange(len(permuted))
    while len(rest):
        left, right = permuted[rest] >> low, permuted[rest] & ((one << low) - one)
        for number in range(_ROUNDS):
            drawn = _scrambled(right + keys[number]) & ((one << widths[number % 2]) - one)
            left, right = right, left ^ drawn
        permuted[rest] = (left << low) | right
        rest = rest[permuted[rest] >= size]
    return permuted.astype(np.int64)


@dataclass(frozen=True)
class SampleOrder:
    """Order of the training samples over all epochs.

    With a `window`, reads are nearly sequential, as hard disks and network mounts need. The samples of a batch are then
    sorted by where they are stored, so that a rank's part of a batch is stored close together.
    """

    seed: int
    """Seed of the shuffles."""
    size: int
    """Number of samples in the data set."""
    repeats: int = 1
    """Number of times in a row that each sample occurs, each with its own random numbers (Hoffer et al. 2020).

    An epoch then takes `repeats` times as many positions.
    """
    block: int = 0
    """Samples in a run that is stored contiguously. The places where runs begin change from epoch to epoch."""
    window: int = 0
    """Samples that are shuffled with each other, a multiple of `block`; 0 shuffles the complete data set."""

    def batch(self, start: int, size: int) -> tuple[Samples, Samples, Samples]:
        """Return (epochs, samples, repeats) of the positions `start` … `start + size - 1`, each int64 [size].

        The repeats number the occurrences of a sample within an epoch, from 0.
        """
        turns, repeats = np.divmod(np.arange(start, start + size), self.repeats)
        epochs, places = np.divmod(turns, self.size)
        samples = np.empty_like(places)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            inside = epochs == epoch
            samples[inside] = self.samples(epoch, places[inside])
        if not self.window:
            return epochs, samples, repeats
        stored = np.lexsort((repeats, epochs, samples))
        return epochs[stored], samples[stored], repeats[stored]

    def samples(self, epoch: int, places: Samples) -> Samples:
        """Return the samples at `places`, from 0 to size - 1, of one epoch: int64 [n]."""
        if not self.window:
            return shuffled(places, self.size, self.seed, epoch)
        whole = self.size // self.block  # the remainder, less than a block, comes last
        windows, inside = np.divmod(places, self.window)
        mixed = np.empty_like(places)
        for window in range(int(windows.min()), int(windows.max()) + 1):
            here, first = windows == window, window * self.window
            here_size = min(self.window, self.size - first)
            mixed[here] = first + shuffled(inside[here], here_size, self.seed, epoch, window)
        runs, offsets = np.divmod(mixed, self.block)
        full = runs < whole
        runs[full] = shuffled(runs[full], whole, self.seed, epoch, -1)
        begin = int(shuffled(np.zeros(1, np.int64), self.size, self.seed, epoch, -2)[0])
        return (runs * self.block + offsets + begin) % self.size
