"""Samples of each batch of packed data, and batches of images of one rank, complete or in progress."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.image_files import NotedImages
from vitpar.data.images import EncodedImage
from vitpar.data.randomness import Draws, SampleOrder, Samples, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.stream.stream_set import Fetched
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.models.config import IGNORED
from vitpar.text import count

NAMED = 3
"""Bad samples that are reported by name; the others are only counted."""

Transform = TrainTransform | EvalTransform
Encoded = ShardSet | NotedImages | Fetched
"""Encoded images that are read by number."""


@dataclass
class View:
    """One crop of each image of a rank's rows."""

    transform: Transform
    """Transform that makes it."""
    draws: Draws
    """Random numbers of the rows."""
    images: Tensor | DrawnBatch | None
    """Images, uint8 [rows, 3, size, size], or what their device needs to make them; None until that is known."""


@dataclass
class BatchJob:
    """Batch whose images are still to be decoded."""

    source: Encoded
    """Provider of the encoded samples."""
    samples: NDArray[np.int64]
    """Number of each sample in `source`, int64 [batch]; IGNORED for padding."""
    keys: NDArray[np.int64]
    """Random key of each sample, int64 [batch]."""
    labels: NDArray[np.int64]
    """Class numbers, int64 [batch]; IGNORED for padding and skipped samples."""
    size: int = 0
    """Side of the images of the first view, in pixels."""
    views: list[View] = field(default_factory=list)
    """Crops of the images of this rank's rows."""
    missing: int = 0
    """Rows whose crops are still to be made."""
    encoded: dict[int, EncodedImage] = field(default_factory=dict)
    """JPEGs that the device decodes, by their places among this rank's rows."""
    skipped: list[str] = field(default_factory=list)
    """Message for each sample that was skipped."""
    broken: list[str] = field(default_factory=list)
    """Message for each shard that was skipped from some place on."""
    ended: bool = False
    """Whether this rank's stream is exhausted."""


@dataclass(frozen=True)
class Batch:
    """Global batch, with one rank's part of the images."""

    images: Tensor | DrawnBatch | None
    """Images of this rank's rows, uint8 [rows, 3, size, size], or what their device needs to make them; None without
    rows."""
    labels: Tensor
    """Class numbers, int64 [batch]; IGNORED (-1) for padding and for samples that this rank skipped."""
    keys: Tensor
    """Random key of every (epoch, sample, repeat), int64 [batch]; 0 in evaluation.

    All random numbers of the model derive from these keys.
    """
    epoch: float
    """`samples` divided by the size of the data set."""
    samples: int
    """Global samples seen up to and including this batch, which is where the next one begins."""
    size: int
    """Side of its images, in pixels, also on ranks without rows."""
    further: tuple[Tensor | DrawnBatch | None, ...] = ()
    """Images of further views, if the loader has several transforms."""
    whole: bool = True
    """Whether labels and keys cover the global batch.

    In batches of a stream they cover only the rank's own rows; the others are IGNORED and 0.
    """
    ended: bool = False
    """Whether this rank's stream is exhausted.

    Such a rank continues to yield empty batches, without end, because other ranks may have longer streams.
    """


@dataclass(frozen=True)
class Skipped:
    """Bad samples and shards that were skipped."""

    times: int = 0
    """Number of times that a sample was skipped."""
    problems: tuple[str, ...] = ()
    """Messages for at most `NAMED` bad samples and shards, sorted."""
    shards: int = 0
    """Number of times that a streamed shard, or the rest of one, was skipped."""

    @property
    def words(self) -> str | None:
        """Sentence on what was skipped; None if nothing was."""
        counts = {"images": self.times, "shards": self.shards}
        parts = [f"{noun} skipped {count(times, 'time')}" for noun, times in counts.items() if times]
        return f"{', '.join(parts)}: {'; '.join(self.problems)}" if parts else None

    def __add__(self, other: Skipped) -> Skipped:
        problems = sorted({*self.problems, *other.problems})
        return Skipped(self.times + other.times, tuple(problems[:NAMED]), self.shards + other.shards)


def shuffled_places(
    data: ShardSet, order: SampleOrder, start: int, batch_size: int, *, reads: bool = True
) -> Iterator[tuple[Samples, Samples]]:
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


def places_in_turn(size: int, batch_size: int) -> Iterator[Samples]:
    """Yield the numbers of the samples of each batch, int64 [batch], all once; IGNORED pads the last batch."""
    for first in range(0, size, batch_size):
        samples = np.arange(first, first + batch_size)
        yield np.where(samples < size, samples, IGNORED)
