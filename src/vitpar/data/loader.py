"""One rank's batches of a training or validation set.

A global batch is the same under every plan. Every rank has the labels and keys of all of it, which come from the index,
and the images of those rows that it names; ranks that need no pixels, such as the later stages of a pipeline, name none
and open no shard.
"""

import itertools
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.decoding import BadSample, Decoder, Job, Skipped
from vitpar.data.order import Order
from vitpar.data.randomness import Draws, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms import EvalTransform, TrainTransform
from vitpar.errors import DataError
from vitpar.models import IGNORED


@dataclass(frozen=True)
class Batch:
    """A training batch, with one rank's part of the images.

    images: uint8 [rows, 3, size, size], None without rows. labels: int64 [batch], IGNORED (-1) for a sample that was
    skipped here. keys: int64 [batch], the random key of every (epoch, sample, repeat), which all randomness in the
    model follows.
    samples: global samples seen when this batch is done, where the next one begins; epoch: the same in multiples of the
    data set's size. whole: whether labels and keys are those of the whole batch; from a stream a rank has only those of
    its own rows, which elsewhere are IGNORED and 0.
    """

    images: Tensor | None
    labels: Tensor
    keys: Tensor
    epoch: float
    samples: int
    whole: bool = True


@dataclass(frozen=True)
class EvalBatch:
    """A validation batch, with one rank's part of the images.

    images: uint8 [rows, 3, size, size], None without rows. labels: int64 [batch], IGNORED (-1) for padding and for
    samples skipped here. whole: as in `Batch`. ended: the stream of this rank has given all it had; such batches follow
    without end, for the ranks whose streams are longer.
    """

    images: Tensor | None
    labels: Tensor
    whole: bool = True
    ended: bool = False


class TrainLoader:
    """Endless training batches, of which the first begins when `start` samples have been seen; every `iter()` starts
    there anew.

    order: of all samples of `shards`. batch_size: of the global batch. rows: which of its images to give, in this order
    (None: all). workers: decoding threads (0: none), which change the speed only. pin_memory: whether images are in
    memory that a GPU copies from by itself. skipped: bad samples met so far.

    With bad_sample="skip" only ranks that decode a sample can know that it is bad: elsewhere it keeps its label.

    Raises DataError for a batch of no images, RecipeError for a wrong setting.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform,
        *,
        order: Order,
        batch_size: int,
        rows: Sequence[int] | None = None,
        workers: int = 2,
        bad_sample: BadSample = "fail",
        pin_memory: bool = False,
        start: int = 0,
    ) -> None:
        assert order.size == len(shards), f"an order of {order.size} samples for {len(shards)}"
        self.shards = shards
        self.order = order
        self.batch_size = batch_size
        self.start = start
        self._rows = chosen_rows(batch_size, rows)
        self._decoder = Decoder(
            lambda image, key: transform(image, Draws(key)),
            transform.size,
            workers=workers,
            bad_sample=bad_sample,
            pin_memory=pin_memory,
        )

    @property
    def skipped(self) -> Skipped:
        return self._decoder.skipped

    def __iter__(self) -> Generator[Batch]:
        samples = self.start
        with closing(self._decoder.fill(self._jobs()) if len(self._rows) else self._jobs()) as jobs:
            for job in jobs:
                samples += self.batch_size
                yield Batch(
                    images=job.images,
                    labels=torch.from_numpy(job.labels),
                    keys=torch.from_numpy(job.keys),
                    epoch=samples / len(self.shards),
                    samples=samples,
                )

    def _jobs(self) -> Generator[Job]:
        checked = -1
        for start in itertools.count(self.start, self.batch_size):
            epochs, samples, repeats = self.order.batch(start, self.batch_size)
            if len(self._rows) and epochs[-1] > checked:
                self.shards.refuse_changed()
                checked = int(epochs[-1])
            keys = sample_keys(self.order.seed, epochs, samples, repeats)
            yield Job(self.shards, samples, keys, self.shards.labels[samples].astype(np.int64), self._rows)


class EvalLoader:
    """The whole split once, in order, in `len()` batches of one shape; the tail is padded with label IGNORED (-1).

    batch_size: of the global batch; every rank has the same number of batches, some perhaps of padding alone. The
    other settings are those of TrainLoader. Raises DataError for a batch of no images, RecipeError for a wrong
    setting.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: EvalTransform,
        *,
        batch_size: int,
        rows: Sequence[int] | None = None,
        workers: int = 2,
        bad_sample: BadSample = "fail",
        pin_memory: bool = False,
    ) -> None:
        self.shards = shards
        self.batch_size = batch_size
        self._rows = chosen_rows(batch_size, rows)
        self._decoder = Decoder(
            lambda image, key: transform(image),
            transform.size,
            workers=workers,
            bad_sample=bad_sample,
            pin_memory=pin_memory,
        )

    @property
    def skipped(self) -> Skipped:
        return self._decoder.skipped

    def __len__(self) -> int:
        return -(-len(self.shards) // self.batch_size)

    def __iter__(self) -> Generator[EvalBatch]:
        with closing(self._decoder.fill(self._jobs()) if len(self._rows) else self._jobs()) as jobs:
            for job in jobs:
                yield EvalBatch(images=job.images, labels=torch.from_numpy(job.labels))

    def _jobs(self) -> Generator[Job]:
        for step in range(len(self)):
            samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
            real = samples < len(self.shards)
            labels = np.full(len(samples), IGNORED, dtype=np.int64)
            labels[real] = self.shards.labels[samples[real]]
            yield Job(self.shards, np.where(real, samples, IGNORED), np.zeros_like(samples), labels, self._rows)


def chosen_rows(batch_size: int, rows: Sequence[int] | None) -> NDArray[np.int64]:
    """`rows` of a batch, all where None: int64 [rows]. Raises DataError for a batch of no images."""
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}: use 1 or more")
    chosen = np.arange(batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
    assert ((chosen >= 0) & (chosen < batch_size)).all(), f"rows {rows} are not all within a batch of {batch_size}"
    return chosen
