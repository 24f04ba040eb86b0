"""One rank's batches of a training or validation set.

A global batch is the same under every plan. A rank takes the contiguous part `data_index` of `data_parallel` equal
ones; ranks that work on the same samples (tensor and pipeline parallel ones) are given the same `data_index`. Ranks
that need no pixels, such as the later stages of a pipeline, pass `pixels=False`: labels and keys then come from the
index and no shard is opened.
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
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
    """One rank's part of a training batch.

    images: uint8 [local, 3, size, size], None without pixels. labels: int64 [local], IGNORED (-1) for a skipped
    sample. keys: int64 [local], the random key of every (epoch, sample), which all randomness in the model follows.
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
    """One rank's part of a validation batch.

    images: uint8 [local, 3, size, size], None without pixels. labels: int64 [local], IGNORED (-1) for padding and
    skipped samples.
    """

    images: Tensor | None
    labels: Tensor


class TrainLoader:
    """Endless training batches from step `start_step` on; every `iter()` starts there anew.

    batch_size: of the global batch. data_index, data_parallel: the rank's part of it. workers: decoding threads (0:
    none), which change the speed only. skipped: bad samples met so far.

    With bad_sample="skip" only ranks with pixels can know which samples are bad: without pixels a bad sample keeps
    its label.

    Raises DataError when the batch cannot be divided, RecipeError for a wrong setting.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform,
        *,
        batch_size: int,
        data_index: int = 0,
        data_parallel: int = 1,
        seed: int = 0,
        workers: int = 2,
        pixels: bool = True,
        bad_sample: BadSample = "fail",
        start_step: int = 0,
    ) -> None:
        self.shards = shards
        self.batch_size = batch_size
        self.seed = seed
        self.pixels = pixels
        self.start_step = start_step
        self._part = _part(batch_size, data_index, data_parallel)
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
        with closing(self._decoder.fill(self._jobs()) if self.pixels else self._jobs()) as jobs:
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
            epochs, samples = epochs[self._part], samples[self._part]
            keys = sample_keys(self.seed, epochs, samples)
            yield Job(step, samples, keys, self.shards.labels[samples].astype(np.int64))
            step += 1


class EvalLoader:
    """The whole split once, in order, in `len()` batches of one shape; the tail is padded with label IGNORED (-1).

    batch_size: of the global batch; every rank has the same number of batches, some perhaps of padding alone. The
    other settings are those of TrainLoader. Raises DataError when the batch cannot be divided, RecipeError for a
    wrong setting.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: EvalTransform,
        *,
        batch_size: int,
        data_index: int = 0,
        data_parallel: int = 1,
        workers: int = 2,
        pixels: bool = True,
        bad_sample: BadSample = "fail",
    ) -> None:
        self.shards = shards
        self.batch_size = batch_size
        self.pixels = pixels
        self._part = _part(batch_size, data_index, data_parallel)
        self._decoder = Decoder(
            shards, lambda image, key: transform(image), transform.size, workers=workers, bad_sample=bad_sample
        )

    @property
    def skipped(self) -> Skipped:
        return self._decoder.skipped

    def __len__(self) -> int:
        return -(-len(self.shards) // self.batch_size)

    def __iter__(self) -> Generator[EvalBatch]:
        with closing(self._decoder.fill(self._jobs()) if self.pixels else self._jobs()) as jobs:
            for job in jobs:
                yield EvalBatch(images=job.images, labels=torch.from_numpy(job.labels))

    def _jobs(self) -> Generator[Job]:
        for step in range(len(self)):
            samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)[self._part]
            real = samples < len(self.shards)
            labels = np.full(len(samples), IGNORED, dtype=np.int64)
            labels[real] = self.shards.labels[samples[real]]
            yield Job(step, np.where(real, samples, IGNORED), np.zeros_like(samples), labels)


def _part(batch_size: int, data_index: int, data_parallel: int) -> slice:
    """The rows of the global batch that part `data_index` of `data_parallel` takes."""
    assert 0 <= data_index < data_parallel, f"data index {data_index} is not one of {data_parallel}"
    if batch_size < 1 or batch_size % data_parallel:
        raise DataError(
            f"batch size {batch_size} cannot be divided among {data_parallel} data-parallel ranks: "
            f"use a positive multiple of {data_parallel}"
        )
    local = batch_size // data_parallel
    return slice(data_index * local, (data_index + 1) * local)
