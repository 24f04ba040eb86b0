"""One rank's batches of a training or validation set.

A global batch is the same under every plan. Every rank has the labels and keys of all of it, which come from the index,
and the images of those rows that it names; ranks that need no pixels, such as the later stages of a pipeline, name none
and open no shard.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitpar.data.decoding import BadSample, Decoder, Job, Skipped
from vitpar.data.index import ShardSet
from vitpar.data.order import batch_samples
from vitpar.data.randomness import Draws, sample_keys
from vitpar.data.transforms import EvalTransform, TrainTransform
from vitpar.errors import DataError
from vitpar.models import IGNORED


@dataclass(frozen=True)
class Batch:
    """A training batch, with one rank's part of the images.

    images: uint8 [rows, 3, size, size], None without rows. labels: int64 [batch], IGNORED (-1) for a sample that was
    skipped here. keys: int64 [batch], the random key of every (epoch, sample), which all randomness in the model
    follows.
    step: number of this batch, the first is 0. samples: global samples seen when this batch is done; epoch: the same
    in passes over the data.
    """

    images: Tensor | None
    labels: Tensor
    keys: Tensor
    step: int
    epoch: float
    samples: int


@dataclass(frozen=True)
class EvalBatch:
    """A validation batch, with one rank's part of the images.

    images: uint8 [rows, 3, size, size], None without rows. labels: int64 [batch], IGNORED (-1) for padding and for
    samples skipped here.
    """

    images: Tensor | None
    labels: Tensor


class TrainLoader:
    """Endless training batches from step `start_step` on; every `iter()` starts there anew.

    batch_size: of the global batch. rows: which of its images to give, in this order (None: all). workers: decoding
    threads (0: none), which change the speed only. skipped: bad samples met so far.

    With bad_sample="skip" only ranks that decode a sample can know that it is bad: elsewhere it keeps its label.

    Raises DataError for a batch of no images, RecipeError for a wrong setting.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform,
        *,
        batch_size: int,
        rows: Sequence[int] | None = None,
        seed: int = 0,
        workers: int = 2,
        bad_sample: BadSample = "fail",
        start_step: int = 0,
    ) -> None:
        self.shards = shards
        self.batch_size = batch_size
        self.seed = seed
        self.start_step = start_step
        self._rows = _rows(batch_size, rows)
        self._decoder = Decoder(
            shards,
            lambda image, key: transform(image, Draws(key)),
            transform.size,
            workers=workers,
            bad_sample=bad_sample,
        )

    @property
    def skipped(self) -> Skipped:
        return self._decoder.skipped

    def __iter__(self) -> Generator[Batch]:
        with closing(self._decoder.fill(self._jobs()) if len(self._rows) else self._jobs()) as jobs:
            for job in jobs:
                samples = (job.step + 1) * self.batch_size
                yield Batch(
                    images=job.images,
                    labels=torch.from_numpy(job.labels),
                    keys=torch.from_numpy(job.keys),
                    step=job.step,
                    epoch=samples / len(self.shards),
                    samples=samples,
                )

    def _jobs(self) -> Generator[Job]:
        step = self.start_step
        while True:
            epochs, samples = batch_samples(self.seed, len(self.shards), step, self.batch_size)
            keys = sample_keys(self.seed, epochs, samples)
            yield Job(step, samples, keys, self.shards.labels[samples].astype(np.int64), self._rows)
            step += 1


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
    ) -> None:
        self.shards = shards
        self.batch_size = batch_size
        self._rows = _rows(batch_size, rows)
        self._decoder = Decoder(
            shards, lambda image, key: transform(image), transform.size, workers=workers, bad_sample=bad_sample
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
            yield Job(step, np.where(real, samples, IGNORED), np.zeros_like(samples), labels, self._rows)


def _rows(batch_size: int, rows: Sequence[int] | None) -> NDArray[np.int64]:
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}: use 1 or more")
    chosen = np.arange(batch_size) if rows is None else np.asarray(rows, dtype=np.int64)
    assert ((chosen >= 0) & (chosen < batch_size)).all(), f"rows {rows} are not all within a batch of {batch_size}"
    return chosen
