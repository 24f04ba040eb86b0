"""Images of data sets in the memory of a device, from which loaders take them in place of decoding.

The ranks of a machine decode all images together at the start, into memory that they share. A GPU then gets a copy;
ranks that compute on CPUs use the shared memory itself.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vitpar.data.cache import Shape, shared_file, unequal
from vitpar.data.images import BadImage, decode
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError

_TASK = 256  # images that a thread decodes at a time


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
