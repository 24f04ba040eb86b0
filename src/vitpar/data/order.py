"""Which sample comes when: the global order of training samples as a pure function of (seed, position).

Positions 0, 1, 2, … run through the epochs without a break: position p is the sample that stands at p % n in the
shuffle of epoch p // n. So every sample comes exactly once an epoch, every batch is full (one may straddle two
epochs), and any step of a run can be asked for without going through those before it.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import hash_numbers

_SHUFFLE = 0x5F1E  # sets the shuffle apart from the sample keys, which hash the same numbers


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """The shuffle of one epoch: int64 [num_samples], read-only. Samples sorted by a hash of (seed, epoch, sample)."""
    order = np.argsort(hash_numbers(_SHUFFLE, seed, epoch, np.arange(num_samples)), kind="stable")
    order.flags.writeable = False
    return order


def batch_samples(
    seed: int, num_samples: int, step: int, batch_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples of global batch `step` (the first is 0): their epochs and indices, each int64 [batch_size]."""
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, places = np.divmod(positions, num_samples)
    indices = np.empty_like(positions)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        inside = epochs == epoch
        indices[inside] = permutation(seed, epoch, num_samples)[places[inside]]
    return epochs, indices
