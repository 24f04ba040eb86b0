"""Decoded images in memory, shared by the ranks of a machine: those that were read, or all for their device.

Every epoch gives a rank other images, so ranks that each kept their own would find few of them in the second epoch.
They share one file without a name instead, which the system removes with the last process that has it open, however
that ends.

Images are stored in the order in which they are first decoded, until the limit, and stay. With a new order every epoch,
no choice of images to keep finds more of them.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vitpar.data.images import BadImage, decode
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.survey import some_sizes
from vitpar.errors import DataError
from vitpar.text import shown

if TYPE_CHECKING:
    from torch import Tensor

    from vitpar.data.transforms.sample import EvalTransform

Shape = tuple[int, int, int, int]
"""Shape of decoded images of one size: number, channels, height, width."""
_TASK = 256  # images that a thread decodes at a time for the device
_UNIT = 256  # bytes that an image is rounded up to: 32 bits then number the units of 1 TiB
_SIDE = 1 << 16  # height and width of a stored image are below it
_BEING_STORED = 1 << 32  # entry without height, which another thread or rank is filling
_NEXT, _FULL = range(2)  # first free unit, and whether an image did not fit
_HEAD = 2  # numbers before the entries


class SharedMemory:
    """Memory in a file without a name, which other processes may open too.

    size: bytes.
    opened: path of the file of another process with the same size; None for a new one.

    Raises DataError for a file that cannot be opened, or of another size.
    """

    def __init__(self, size: int, opened: str | None) -> None:
        self._file = -1
        if opened is not None:
            try:
                self._file = os.open(opened, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise DataError(
                    f"the cache of another rank cannot be opened ({error.strerror}): set data.cache to none"
                ) from None
            if os.fstat(self._file).st_size != size:
                raise DataError(
                    "the cache of another rank has another size: start all ranks with the same recipe and data"
                )
        else:
            self._file = os.memfd_create("vitpar-images")
            os.ftruncate(self._file, size)
        # A file of memory takes no memory for pages that were never written.
        self._memory = mmap.mmap(self._file, size)

    @property
    def path(self) -> str:
        """Path at which other processes of this machine can open the file while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        # Views of images keep the mapping itself alive; only the descriptor is closed.
        if getattr(self, "_file", -1) >= 0:
            os.close(self._file)


class ImageCache(SharedMemory):
    """Decoded images of several sets in one memory, as `SharedMemory`. Any thread may read and store.

    lengths: number of images of each set.
    limit: most bytes of images. Memory is taken as they are stored; the index takes 8 bytes an image.
    opened: path of the file of another process's cache with the same arguments; None for a new one.
    """

    def __init__(self, lengths: Sequence[int], limit: int, opened: str | None = None) -> None:
        assert limit >= _UNIT, f"a limit of {limit} bytes"
        self._firsts = [0, *accumulate(lengths)]
        numbers = _HEAD + self._firsts[-1]
        self._begin, self._units = -(-8 * numbers // _UNIT) * _UNIT, limit // _UNIT
        super().__init__(self._begin + self._units * _UNIT, opened)
        self._numbers = np.frombuffer(self._memory, np.int64, numbers)
        self._pixels = np.frombuffer(self._memory, np.uint8, offset=self._begin)
        self._threads = threading.Lock()

    @property
    def stored(self) -> int:
        """Bytes of all images stored so far, by any process."""
        return int(self._numbers[_NEXT]) * _UNIT

    def part(self, number: int) -> CachedSet:
        """Return the images of one of the sets."""
        return CachedSet(self, self._firsts[number])

    def get(self, i: int) -> NDArray[np.uint8] | None:
        """Return stored image `i` of all sets, uint8 [height, width, 3], not to be written to; None if there is none.

        One 64-bit number says where it is and how large, so a reader never sees half of an entry.
        """
        entry = int(self._numbers[_HEAD + i])
        width, height, unit = entry % _SIDE, (entry >> 16) % _SIDE, entry >> 32
        if not height:
            return None
        begin = (unit - 1) * _UNIT
        return self._pixels[begin : begin + 3 * height * width].reshape(height, width, 3)

    def put(self, i: int, image: NDArray[np.uint8]) -> None:
        """Store image `i`, unless it is stored already or does not fit. image: uint8 [height, width, 3]."""
        height, width, _ = image.shape
        place, units = _HEAD + i, -(-image.nbytes // _UNIT)
        if self._numbers[_FULL] or self._numbers[place] or max(height, width) >= _SIDE:
            return
        with self._alone():
            unit = int(self._numbers[_NEXT])
            if self._numbers[place]:
                return
            if unit + units > self._units:
                self._numbers[_FULL] = 1
                return
            self._numbers[_NEXT] = unit + units
            self._numbers[place] = _BEING_STORED
        if not self._written(unit * _UNIT, np.ascontiguousarray(image)):
            self._numbers[_FULL] = 1
            return
        with self._alone():  # taking the lock also makes the pixels visible before their entry
            self._numbers[place] = (unit + 1) << 32 | height << 16 | width

    def _written(self, begin: int, image: NDArray[np.uint8]) -> bool:
        """Write an image at byte `begin` of the pixels, and return whether there was memory for it.

        Writing to the file takes half of the time of writing to its mapping, where each new page is an interrupt, and
        without memory it fails instead of ending the process.
        """
        try:
            return os.pwrite(self._file, image.data, self._begin + begin) == image.nbytes
        except OSError:
            return False

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Exclude other threads, and other processes. The system ends a lock with its process."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class SharedPixels(SharedMemory):
    """Uninitialised images of several sets in one memory, as `SharedMemory`. shapes: of each set."""

    def __init__(self, shapes: Sequence[Shape], opened: str | None = None) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        super().__init__(sum(sizes), opened)
        import torch

        parts = torch.from_numpy(np.frombuffer(self._memory, np.uint8)).split(sizes)
        self.images = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        """Images of each set, uint8, of the shapes."""


class CachedSet:
    """Decoded images of one set in a cache.

    cache: the cache.
    first: number of the set's first image in it.
    """

    def __init__(self, cache: ImageCache, first: int) -> None:
        self._cache, self._first = cache, first

    def get(self, i: int) -> NDArray[np.uint8] | None:
        """Return image `i` of the set as `ImageCache.get` does."""
        return self._cache.get(self._first + i)

    def put(self, i: int, image: NDArray[np.uint8]) -> None:
        """Store image `i` of the set as `ImageCache.put` does."""
        self._cache.put(self._first + i, image)


def stored_shape(images: ShardSet) -> Shape:
    """Return the shape of all images of a set, by its first one. Raises DataError if that cannot be read."""
    try:
        height, width, channels = decode(images.read(0)).shape
    except BadImage as error:
        raise DataError(f"{images.complaint(0, error)}; replace it") from error
    return len(images), channels, height, width


def decoded_bytes(images: ShardSet) -> int:
    """Estimate the bytes of all decoded images. Raises DataError as `some_sizes` does."""
    sizes = [-(-3 * width * height // _UNIT) * _UNIT for _, height, width in some_sizes(images)]
    return round(len(images) * float(np.mean(sizes))) if sizes else 0


def refuse_unequal(images: ShardSet) -> None:
    """Raise DataError if some images of a set have another height or width than the first ones.

    Raises DataError too as `some_sizes` does.
    """
    first: list[int] | None = None
    for i, *shape in some_sizes(images):
        first = first or shape
        if shape != first:
            raise DataError(unequal(images, i, shape, first))


def unequal(images: ShardSet, i: int, shape: Sequence[int], first: Sequence[int]) -> str:
    """Return a message that image `i` has another height and width than the first one."""
    sizes = (f"{height} x {width}" for height, width in (shape, first))
    return (
        "data.cache 'device' needs training images of one size, but sample '{}' of '{}' has {} pixels and the first "
        "one {}: set data.cache to memory or none"
    ).format(shown(images.name(i)), images.folder, *sizes)


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
