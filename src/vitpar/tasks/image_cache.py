"""Cache of decoded images as the recipe says, made by all ranks together."""

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from vitpar.data import ImageCache, ShardSet, decoded_bytes
from vitpar.errors import DataError
from vitpar.launch.local_ranks import LocalRanks, available_memory
from vitpar.launch.world_group import all_gather_json
from vitpar.limits import MAX_CACHE_BYTES
from vitpar.text import size
from vitpar.training.recipe import Recipe

SHARE = 0.5
"""Part of the available memory that the cache may fill by default. Training, and the files that are read, need some."""
_LEAST = 1 << 20  # bytes of a cache that is worth making


def make_cache(
    recipe: Recipe, local: LocalRanks, sets: Sequence[ShardSet], decodes: bool
) -> tuple[ImageCache | None, str]:
    """Return a cache of the images of `sets`, and a message about it, which is the same on all ranks. Collective.

    decodes: whether this rank decodes images. Others get None.

    The ranks of a machine have one cache. If they are in several containers, each of these has one, and they divide the
    machine's memory. Raises DataError, on all ranks, if there is no memory for a cache, or if it cannot be shared.
    """
    lengths, decoding = [len(images) for images in sets], all_gather_json(decodes)
    first = next((rank for rank in local.ranks if decoding[rank]), None)
    makes = dist.get_rank() == first
    cache, error, limit, whole = None, None, 0, 0
    if makes:
        try:
            limit = _limit(recipe, local)
            cache = ImageCache(lengths, limit)
            whole = sum(map(decoded_bytes, sets)) if dist.get_rank() == decoding.index(True) else 0
        except (DataError, OSError) as refused:
            error = str(refused)
    made = all_gather_json([cache.path if cache else None, limit, whole, error])
    _refuse(one[-1] for one in made)
    if decodes and not makes:
        assert first is not None, "this rank is one of those that decode"
        try:
            cache = _opened(lengths, *made[first][:2])
        except DataError as refused:
            error = f"rank {dist.get_rank()}: {refused}"
    _refuse(all_gather_json(error))
    _, limit, whole, _ = made[decoding.index(True)]
    return cache, _message(limit, whole)


def _limit(recipe: Recipe, local: LocalRanks) -> int:
    """Return the most bytes of this rank's cache.

    Raises DataError if they are too few.
    """
    available, wanted = available_memory(), recipe.data.cache_gb
    if wanted is None and available is None:
        raise DataError("this system does not say how much memory is available: set data.cache_gb")
    most = wanted * 1e9 if wanted is not None else SHARE * (available or 0)
    if available is not None and most > available:
        raise DataError(
            f"data.cache_gb is {wanted:g}, but {size(available)} of memory are available: set a smaller number, or "
            "data.cache to none"
        )
    limit = min(int(most * len(local.ranks) / local.size), MAX_CACHE_BYTES)
    if limit < _LEAST:
        raise DataError(f"{size(limit)} of memory are too few to cache images: set data.cache to none")
    return limit


def _opened(lengths: Sequence[int], path: str | None, limit: int) -> ImageCache:
    if path is None:
        raise DataError("this system cannot share memory between ranks: set data.cache to none, or start one rank")
    return ImageCache(lengths, limit, path)


def _message(limit: int, whole: int) -> str:
    words = f"decoded images are cached: about {size(whole)}, in at most {size(limit)} of a machine's memory"
    return f"{words}; the rest is decoded every epoch" if whole > limit else words


def _refuse(errors: Iterable[str | None]) -> None:
    for error in errors:
        if error is not None:
            raise DataError(error)
