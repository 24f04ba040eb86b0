"""Decoded images that the ranks of a machine keep together, as the recipe says: in a cache, or all on their devices."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vitpar.data.cache import ImageCache, Shape, SharedMemory, SharedPixels, decode_into, decoded_bytes
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError
from vitpar.launch.local_ranks import LocalRanks, available_memory
from vitpar.launch.world_group import all_gather_json
from vitpar.recipe import Recipe
from vitpar.tasks.data import held_shapes
from vitpar.text import size

SHARE = 0.5
"""Part of the available memory that images may fill by default. Training, and the files that are read, need some."""
_LEAST = 1 << 20  # bytes of a cache that is worth making
_INSTEAD = "set data.cache to memory or none"
Memory = TypeVar("Memory", bound=SharedMemory)


def make_cache(recipe: Recipe, local: LocalRanks, sets: Sequence[ShardSet]) -> tuple[ImageCache, str]:
    """Return a cache of the images of `sets`, and a message about it, which is the same on all ranks. Collective.

    Raises DataError, on all ranks, if there is no memory for a cache, or if it cannot be shared.
    """
    lengths = [len(images) for images in sets]

    def make() -> tuple[ImageCache, list[int]]:
        limit = _limit(recipe, local)
        return ImageCache(lengths, limit), [limit, sum(map(decoded_bytes, sets))]

    cache, (limit, whole) = _shared(local, make, lambda path, facts: ImageCache(lengths, facts[0], path))
    words = f"decoded images are cached: about {size(whole)}, in at most {size(limit)} of a machine's memory"
    return cache, f"{words}; the rest is decoded every epoch" if whole > limit else words


def hold_images(
    train: ShardSet,
    val: ShardSet | None,
    evaluation: EvalTransform,
    local: LocalRanks,
    device: torch.device,
    workers: int,
    decodes: bool,
) -> tuple[list[Tensor] | None, str]:
    """Return the images of both sets on `device`, and a message about them, which is the same on all ranks. Collective.

    The images are uint8 [images, 3, height, width]: of `train` as decoded, of `val` as `evaluation` makes them, with
    one black image more, which stands for padding. All ranks of a machine decode a part of them.

    workers: decoding threads of this rank.
    decodes: whether this rank takes images. Others get None.

    Raises DataError, on all ranks, for images that cannot be read, or of several sizes, and if there is no memory.
    """

    def make() -> tuple[SharedPixels, list[Shape]]:
        shapes = held_shapes(train, val, evaluation.size)
        _refuse_large(shapes, available_memory(), local.size // len(local.ranks), "of memory are available")
        return SharedPixels(shapes), shapes

    memory, shapes = _shared(local, make, lambda path, shapes: SharedPixels(shapes, path))
    part, error = slice(local.ranks.index(dist.get_rank()), None, len(local.ranks)), None
    try:
        if device.type == "cuda" and decodes:
            _refuse_large(shapes, torch.cuda.mem_get_info(device)[0], 1, "of the GPU's memory are free")
        decode_into(memory.images[0], train, range(len(train))[part], None, workers)
        if val is not None:
            decode_into(memory.images[1], val, range(len(val))[part], evaluation, workers)
    except DataError as refused:
        error = str(refused)
    _refuse_any(all_gather_json(error))  # all images are decoded then
    held = [images.to(device) for images in memory.images] if decodes else None
    where = "the memory of each GPU" if device.type == "cuda" else "one memory of a machine's ranks"
    return held, f"images are held in {where}, {size(_bytes(shapes))}, and augmented there in batches"


def _shared(
    local: LocalRanks, make: Callable[[], tuple[Memory, Any]], opened: Callable[[str, Any], Memory]
) -> tuple[Memory, Any]:
    """Return memory that the ranks of a machine share, and facts about it, which are the same on all ranks. Collective.

    The ranks of a machine have one memory. If they are in several containers, each of these has one, and they divide
    the machine's memory.

    make: returns the memory, and facts for the others, as JSON.
    opened: opens the memory of another rank, by its path and its facts.

    Raises DataError, on all ranks, if one of them cannot make or open it.
    """
    rank, first = dist.get_rank(), local.ranks[0]
    memory, facts, error = None, None, None
    try:
        if rank == first:
            memory, facts = make()
    except (DataError, OSError) as refused:
        error = str(refused)
    made = all_gather_json([memory.path if memory else None, facts, error])
    _refuse_any(one[-1] for one in made)
    try:
        if memory is None:
            path, facts, _ = made[first]
            memory = opened(path, facts)
    except DataError as refused:
        error = f"rank {rank}: {refused}"
    _refuse_any(all_gather_json(error))
    assert memory is not None, "all ranks have succeeded"
    return memory, made[0][1]


def _limit(recipe: Recipe, local: LocalRanks) -> int:
    """Return the most bytes of this rank's cache. Raises DataError if they are too few."""
    available, wanted = available_memory(), recipe.data.cache_gb
    if wanted is None and available is None:
        raise DataError("this system does not say how much memory is available: set data.cache_gb")
    most = wanted * 1e9 if wanted is not None else SHARE * (available or 0)
    if available is not None and most > available:
        raise DataError(
            f"data.cache_gb is {wanted:g}, but {size(available)} of memory are available: set a smaller number, or "
            "data.cache to none"
        )
    limit = int(most * len(local.ranks) / local.size)
    if limit < _LEAST:
        raise DataError(f"{size(limit)} of memory are too few to cache images: set data.cache to none")
    return limit


def _bytes(shapes: Sequence[Shape]) -> int:
    return sum(map(math.prod, shapes))


def _refuse_large(shapes: Sequence[Shape], available: int | None, sharing: int, words: str) -> None:
    """Raise DataError if the images take more than `SHARE` of the available memory.

    sharing: equal memories that take of it.
    """
    if available is not None and sharing * _bytes(shapes) > SHARE * available:
        raise DataError(
            f"data.cache 'device' holds all images, {size(_bytes(shapes))} decoded, but {size(available)} {words}, of "
            f"which training needs a part: {_INSTEAD}, or pack smaller images"
        )


def _refuse_any(errors: Iterable[str | None]) -> None:
    """Raise DataError with the first error of a rank, if there is one."""
    error = next((error for error in errors if error is not None), None)
    if error is not None:
        raise DataError(error)
