"""Samples of each batch of a packed data set, for images and text alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.models.config import IGNORED

Numbers = NDArray[np.int64]


def shuffled_places(
    data: ShardSet, order: SampleOrder, start: int, batch_size: int, *, reads: bool = True
) -> Iterator[tuple[Numbers, Numbers]]:
    """Yield the numbers and random keys of the samples of each training batch, int64 [batch] both, without end.

    start: global samples seen before the first batch.
    reads: whether samples are read. Then each epoch begins by asking whether a shard was replaced.
    """
    assert order.size == len(data), f"an order of {order.size} samples for {len(data)}"
    checked = -1
    for first in itertools.count(start, batch_size):
        epochs, samples, repeats = order.batch(first, batch_size)
        if reads and epochs[-1] > checked:
            data.refuse_changed()
            checked = int(epochs[-1])
        yield samples, sample_keys(order.seed, epochs, samples, repeats)


def places_in_turn(size: int, batch_size: int) -> Iterator[Numbers]:
    """Yield the numbers of the samples of each batch, int64 [batch], all once; IGNORED pads the last batch."""
    for first in range(0, size, batch_size):
        samples = np.arange(first, first + batch_size)
        yield np.where(samples < size, samples, IGNORED)
