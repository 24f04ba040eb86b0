"""Images of data sets in the memory of a device, and loaders that leave the work on pixels to it.

The ranks of a machine decode all images together at the start, into memory that they share. A GPU then gets a copy;
ranks that compute on CPUs use the shared memory itself. Order, labels, keys and pixels of batches are those of other
loaders. Threads of the host draw the random choices.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from vitpar.data.cache import Shape, shared_file, unequal
from vitpar.data.images import BadImage, decode
from vitpar.data.loader import BatchJob, EvalLoader, Labelled, Loader, LoaderSettings, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.device import DeviceTransform, taken
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError

_TASK = 256  # images that a thread decodes at a time
DRAWING_THREADS = 2
"""Most threads that draw for a GPU. They hold Python's lock, which the thread that starts the GPU's kernels needs."""


class SharedPixels:
    """Uninitialised images of several sets in one memory, which other processes may open too.

    shapes: of each set.
    opened: path of the file of another process with the same shapes; None for a new one.

    Raises DataError for a file that cannot be opened, or of another size.
    """

    def __init__(self, shapes: Sequence[Shape], opened: str | None = None) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self._file = shared_file(sum(sizes), opened)
        memory = np.frombuffer(mmap.mmap(self._file, sum(sizes)), np.uint8)
        parts = torch.from_numpy(memory).split(sizes)
        self.images = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        """Images of each set, uint8, of the shapes."""

    @property
    def path(self) -> str | None:
        """Path at which other processes of this machine can open the file while this one lives; None for no file."""
        return None if self._file < 0 else f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        # The images keep the mapping itself alive; only the descriptor is closed.
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


def decode_into(
    stored: Tensor, images: ShardSet, numbers: range, transform: EvalTransform | None, workers: int
) -> None:
    """Decode some images of a set into their places.

    stored: uint8 [images, 3, height, width].
    transform: what is stored of each image; None for the image itself, which then must have the stored size.
    workers: number of threads.

    Raises DataError for an image that cannot be read, or has another size.
    """
    pixels = stored.numpy()

    def task(part: range) -> None:
        for i in part:
            try:
                image = decode(images.read(i), strict=not images.checked)
            except BadImage as error:
                raise DataError(f"{images.complaint(i, error)}; replace it") from error
            if transform is not None:
                pixels[i] = transform(image).numpy()
                continue
            if image.shape[:2] != pixels.shape[2:]:
                raise DataError(unequal(images, i, image.shape[:2], pixels.shape[2:]))
            pixels[i] = image.transpose(2, 0, 1)

    parts = [numbers[first : first + _TASK] for first in range(0, len(numbers), _TASK)]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        list(pool.map(task, parts))


class _HeldLoader(Loader):
    """Loader whose threads draw random choices for complete batches, and also make the images if these are on the CPU.

    Each of them then computes in one thread: several batches at once take fewer cores than one batch in several threads
    that wait for each other after every call.
    """

    def __init__(self, *args: Any, stored: Tensor, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._stored = stored
        if stored.device.type != "cpu":
            self.workers = min(self.workers, DRAWING_THREADS)

    def _threaded(self, jobs: Iterable[BatchJob]) -> Generator[BatchJob]:
        with closing(super()._threaded(jobs)) as filled:
            for job in filled:
                # The threads have changed the default of threads that start later, besides their own number.
                torch.set_num_threads(torch.get_num_threads())
                yield job

    def _start_thread(self) -> None:
        torch.set_num_threads(1)

    def _task_rows(self, rows: int) -> int:
        return rows

    def _allocate(self, job: BatchJob) -> None:
        job.images = None

    def _fill(self, job: BatchJob, start: int, stop: int) -> None:
        samples, keys = job.samples[self.rows], job.keys[self.rows]
        if isinstance(job.transform, TrainTransform):
            drawn = DeviceTransform(job.transform, self._stored).draw(samples, keys)
        else:
            drawn = taken(self._stored, samples)
        job.images = drawn.made(drawn.packed) if drawn.on_cpu else drawn


class HeldTrainLoader(_HeldLoader, TrainLoader):
    """`TrainLoader` of held images.

    stored: uint8 [images, 3, height, width].
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: TrainTransform,
        stored: Tensor,
        *,
        order: SampleOrder,
        start: int = 0,
        **settings: Unpack[LoaderSettings],
    ) -> None:
        super().__init__(shards, transform, order=order, start=start, stored=stored, **settings)


class HeldEvalLoader(_HeldLoader, EvalLoader):
    """`EvalLoader` of held images.

    stored: images as `transform` makes them, uint8 [images + 1, 3, size, size]. The last one stands for padding.
    """

    def __init__(
        self, images: Labelled, transform: EvalTransform, stored: Tensor, **settings: Unpack[LoaderSettings]
    ) -> None:
        super().__init__(images, transform, stored=stored, **settings)
