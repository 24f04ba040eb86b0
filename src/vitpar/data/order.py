"""Which sample comes when: the global order of training samples as a pure function of (seed, position).

Positions 0, 1, 2, … run through the epochs without a break, so every sample comes exactly once an epoch, every batch is
full (one may straddle two epochs), and any position can be asked for without going through those before it, in memory
that does not grow with the data set: a shuffle is a keyed permutation of numbers, not a list of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import hash_numbers, mix
from vitpar.errors import RecipeError

_SHUFFLE = 0x5F1E  # sets shuffles apart from the sample keys, which hash the same numbers
_ROUNDS = 8
Samples = NDArray[np.int64]


def shuffled(places: Samples, size: int, *key: int) -> Samples:
    """The numbers that stand at `places` of a shuffle of 0 … size - 1. places and what is returned: int64 [n].

    A Feistel network over the bits of a place (Luby and Rackoff 1988), walked until the result is below `size` (Black
    and Rogaway 2002).
    """
    low = np.uint64(max(1, (size - 1).bit_length() // 2))
    high = np.uint64(max(1, (size - 1).bit_length() - int(low)))
    widths, one = (high, low), np.uint64(1)
    keys = hash_numbers(_SHUFFLE, *key, np.arange(_ROUNDS))
    found = places.astype(np.uint64)
    rest = np.arange(len(found))
    while len(rest):
        left, right = found[rest] >> low, found[rest] & ((one << low) - one)
        for number in range(_ROUNDS):
            drawn = mix(right + keys[number]) & ((one << widths[number % 2]) - one)
            left, right = right, left ^ drawn
        found[rest] = (left << low) | right
        rest = rest[found[rest] >= size]
    return found.astype(np.int64)


@dataclass(frozen=True)
class Order:
    """The order in which `size` samples come.

    repeats: how often a sample comes in a row, each time with randomness of its own (Hoffer et al. 2020); a pass over
    the data then takes as many times as many positions.
    block, window: with a window, `window` samples are mixed at a time, which lie in runs of `block`; and a batch has
    its samples in the order in which they are stored, so that a rank's part of it lies close together. For disks that
    turn, and mounts over a network; 0 mixes everything. Where runs begin changes from epoch to epoch.
    Raises RecipeError for a window that holds no whole number of blocks.
    """

    seed: int
    size: int
    repeats: int = 1
    block: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise RecipeError(f"{self.repeats} repeats of a sample: give 1 or more")
        if self.window and (self.block < 1 or self.window % self.block):
            raise RecipeError(
                f"a shuffle window of {self.window} samples is no whole number of blocks of {self.block}: make it a "
                "multiple"
            )

    def batch(self, start: int, size: int) -> tuple[Samples, Samples, Samples]:
        """Positions `start` … `start + size - 1`: their epochs, samples, and which repeat of the sample each is, all
        int64 [size]."""
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
        """What stands at `places`, 0 … size - 1, of one pass over the data: int64 [n]."""
        if not self.window:
            return shuffled(places, self.size, self.seed, epoch)
        whole = self.size // self.block  # what is left over, less than a block, comes last
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
