"""Images of data sets in the memory of a device, from which loaders take them in place of decoding.

The ranks of a machine decode all images together at the start, into memory that they share. A GPU then gets a copy;
ranks that compute on CPUs use the shared memory itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from vitpar.data.cache import unequal
from vitpar.data.images import BadImage, decode
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError

_TASK = 256  # images that a thread decodes at a time


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
