"""Number of threads that decode images for a rank."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.survey import some_sizes
from vitpar.errors import DataError
from vitpar.recipe import Recipe

MOST_THREADS = {"cuda": 16, "cpu": 2}
"""Most decoding threads of a rank by default. On CPUs the model computes on the same cores."""
SMALL = 96 * 96
"""Pixels of a stored image up to which several threads are slower than one: each holds Python's lock for most of its
time, and handing it over takes longer than an operation on such an image
(experiments/results/decoding_threads_2core_2026-11-28.md)."""


def decoding_threads(recipe: Recipe, device_type: str, cores: float, *, small: bool) -> int:
    """Return the decoding threads of a rank: ``data.workers``, or by default its share of the machine's cores.

    By default a rank with a GPU leaves one core to the thread that launches kernels. The number changes the speed only.

    cores: cores of the rank (``LocalRanks.cores``).
    small: whether `are_small` is true for its images.
    """
    if recipe.data.workers is not None:
        return recipe.data.workers
    # Threads that draw for images held on a GPU have a limit of their own (vitpar.data.loader).
    one = small and (device_type == "cpu" or recipe.data.cache != "device")
    most = 1 if one else MOST_THREADS[device_type]
    return max(1, min(most, int(cores) - 1 if device_type == "cuda" else int(cores)))


def are_small(images: object) -> bool:
    """Return whether the images of a packed set on a disk have SMALL pixels or fewer, by some of them.

    False for other sets: threads that read from elsewhere wait for each image.
    """
    pixels = []
    if isinstance(images, ShardSet) and isinstance(images.folder, Path):
        with suppress(DataError):  # of a missing shard, which is reported where it is needed
            pixels = [height * width for _, height, width in some_sizes(images, 8)]
    return bool(pixels) and max(pixels) <= SMALL
