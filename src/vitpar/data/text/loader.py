"""Batches of text. Every rank has the global batch, because ids are small."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.batches import places_in_turn, shuffled_places
from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.text.text_set import TextSet
from vitpar.models.config import IGNORED
from vitpar.threads import in_threads

_EVALUATION = 0x7E57  # seed of the keys of an evaluation


@dataclass(frozen=True)
class TextBatch:
    """Global batch of text."""

    ids: Tensor
    """Ids without special tokens, int64 [batch, tokens]; the pad token, or 0 without one, after the end of each."""
    lengths: Tensor
    """Number of ids in each sequence, int64 [batch]; 0 for padding of the batch."""
    keys: Tensor
    """Random key of every (epoch, sequence, repeat), int64 [batch]; of each sequence in evaluation.

    Masks and all random numbers of the model derive from these keys.
    """
    numbers: Tensor
    """Number of each sequence in its split, int64 [batch]; IGNORED (-1) for padding of the batch."""
    epoch: float
    """`samples` divided by the size of the data set."""
    samples: int
    """Global sequences seen up to and including this batch, which is where the next one begins."""


class TextLoader:
    """Batches of packed text.

    order: order of all sequences of `text`, for endless training batches. None for an evaluation: every sequence once,
        in order, in `len()` batches of the same shape, of which the last is padded with sequences of length 0 and
        number IGNORED. Its keys, and so the masks, are the same every time.
    batch_size: sequences in the global batch.
    start: global sequences seen before the first batch; every `iter()` begins there again.
    workers: number of reading threads; 0 reads in the calling thread. It changes only the speed.
    """

    def __init__(
        self, text: TextSet, *, batch_size: int, order: SampleOrder | None = None, start: int = 0, workers: int = 1
    ) -> None:
        self.text, self.batch_size, self.start, self.workers, self._order = text, batch_size, start, workers, order

    def __len__(self) -> int:
        return -(-len(self.text) // self.batch_size)

    def __iter__(self) -> Generator[TextBatch]:
        with closing(in_threads(self._empty(), lambda batch: [partial(self._read, batch)], self.workers)) as read:
            yield from read

    def _empty(self) -> Iterator[TextBatch]:
        """Yield the batches, whose sequences are still to be read."""
        for number, places in enumerate(self._places(), start=1):
            numbers, keys = map(torch.from_numpy, places)
            ids = torch.full((len(numbers), self.text.tokens), self.text.specials.padding)
            samples = self.start + number * self.batch_size
            yield TextBatch(ids, torch.zeros_like(numbers), keys, numbers, samples / len(self.text), samples)

    def _read(self, batch: TextBatch) -> None:
        numbers = batch.numbers.numpy()
        real = numbers != IGNORED
        batch.ids.numpy()[real], batch.lengths.numpy()[real] = self.text.read_batch(numbers[real])

    def _places(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the numbers and keys of the sequences of each batch, in order."""
        if self._order is not None:
            yield from shuffled_places(self.text, self._order, self.start, self.batch_size)
            return
        for step, numbers in enumerate(places_in_turn(len(self.text), self.batch_size)):
            zeros, places = np.zeros_like(numbers), step * self.batch_size + np.arange(self.batch_size)
            yield numbers, sample_keys(_EVALUATION, zeros, places, zeros)
