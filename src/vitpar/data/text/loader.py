"""Batches of text. Every rank has the global batch, because ids are small."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError, RecipeError
from vitpar.models.config import IGNORED

_PREFETCH = 2  # batches in progress beyond the one that the consumer waits for
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


_Places = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Numbers of sequences and their keys, int64 [batch]."""
_Read = tuple[_Places, NDArray[np.int64], NDArray[np.int64]]
"""Places of a batch, its ids, int64 [batch, tokens], and lengths, int64 [batch]."""


class _Batches:
    """Base class of the loaders, which reads the sequences that a subclass names.

    Raises DataError for a batch size below 1, and RecipeError for a negative number of threads.
    """

    def __init__(self, text: TextSet, batch_size: int, start: int, workers: int) -> None:
        if batch_size < 1:
            raise DataError(f"the batch size is {batch_size}: use 1 or more")
        if workers < 0:
            raise RecipeError(f"workers is {workers}: use 0 to read in the main thread, or a positive number")
        self.text, self.batch_size, self.start, self.workers = text, batch_size, start, workers

    def _places(self) -> Iterator[_Places]:
        """Yield what each batch consists of, in order."""
        raise NotImplementedError

    def __iter__(self) -> Generator[TextBatch]:
        with closing(self._threaded() if self.workers else self._inline()) as read:
            for number, ((numbers, keys), ids, lengths) in enumerate(read, start=1):
                samples = self.start + number * self.batch_size
                tensors = [torch.from_numpy(array) for array in (ids, lengths, keys, numbers)]
                yield TextBatch(tensors[0], tensors[1], tensors[2], tensors[3], samples / len(self.text), samples)

    def _read(self, places: _Places) -> _Read:
        numbers = places[0]
        real = numbers != IGNORED
        if real.all():
            return places, *self.text.read_batch(numbers)
        ids = np.full((len(numbers), self.text.tokens), self.text.specials.padding, np.int64)
        lengths = np.zeros(len(numbers), np.int64)
        ids[real], lengths[real] = self.text.read_batch(numbers[real])
        return places, ids, lengths

    def _inline(self) -> Generator[_Read]:
        yield from map(self._read, self._places())

    def _threaded(self) -> Generator[_Read]:
        waiting: deque[Future[_Read]] = deque()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="vitpar-text")
        try:
            for places in self._places():
                waiting.append(pool.submit(self._read, places))
                if len(waiting) > _PREFETCH:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class TextLoader(_Batches):
    """Endless training batches of packed text.

    order: order of all sequences of `text`.
    batch_size: sequences in the global batch.
    start: global sequences seen before the first batch; every `iter()` begins there again.
    workers: number of reading threads; 0 reads in the calling thread. It changes only the speed.
    """

    def __init__(self, text: TextSet, *, order: SampleOrder, batch_size: int, start: int = 0, workers: int = 1) -> None:
        assert order.size == len(text), f"an order of {order.size} sequences for {len(text)}"
        super().__init__(text, batch_size, start, workers)
        self._order = order

    def _places(self) -> Iterator[_Places]:
        checked = -1
        for start in itertools.count(self.start, self.batch_size):
            epochs, samples, repeats = self._order.batch(start, self.batch_size)
            if epochs[-1] > checked:
                self.text.refuse_changed()
                checked = int(epochs[-1])
            yield samples, sample_keys(self._order.seed, epochs, samples, repeats)


class TextEvalLoader(_Batches):
    """Every sequence of a split once, in order, in `len()` batches of the same shape.

    The last batch is padded with sequences of length 0 and number IGNORED. The keys, and so the masks, are the same in
    every evaluation.
    """

    def __init__(self, text: TextSet, *, batch_size: int, workers: int = 1) -> None:
        super().__init__(text, batch_size, 0, workers)

    def __len__(self) -> int:
        return -(-len(self.text) // self.batch_size)

    def _places(self) -> Iterator[_Places]:
        for step in range(len(self)):
            samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
            zeros = np.zeros_like(samples)
            yield np.where(samples < len(self.text), samples, IGNORED), sample_keys(_EVALUATION, zeros, samples, zeros)
