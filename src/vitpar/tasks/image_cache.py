"""Cache of decoded images as the recipe says, made by all ranks together."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from vitpar.data.cache import ImageCache, decoded_bytes
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError
from vitpar.launch.local_ranks import LocalRanks, available_memory
from vitpar.launch.world_group import all_gather_json
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

    Raises DataError, on all ranks, if there is no memory for a cache, or if it cannot be shared.
    """
    lengths = [len(images) for images in sets]

    def make() -> tuple[ImageCache, list[int]]:
        limit = _limit(recipe, local)
        return ImageCache(lengths, limit), [limit, sum(map(decoded_bytes, sets))]

    cache, (limit, whole) = shared(
        local, decodes, make, lambda path, facts: ImageCache(lengths, facts[0], path), "set data.cache to none"
    )
    return cache, _message(limit, whole)


class _Shared(Protocol):
    @property
    def path(self) -> str | None:
        """Path at which other processes of this machine can open it; None if they cannot."""


Memory = TypeVar("Memory", bound=_Shared)


def shared(
    local: LocalRanks,
    decodes: bool,
    make: Callable[[], tuple[Memory, Any]],
    opened: Callable[[str, Any], Memory],
    otherwise: str,
) -> tuple[Memory | None, Any]:
    """Return memory that the ranks of a machine share, and facts about it, which are the same on all ranks. Collective.

    The ranks of a machine have one memory. If they are in several containers, each of these has one, and they divide
    the machine's memory.

    decodes: whether this rank decodes images. Others get None.
    make: returns the memory, and facts for the others, as JSON.
    opened: opens the memory of another rank, by its path and its facts.
    otherwise: what to do on a system that cannot share memory.

    Raises DataError, on all ranks, if one of them cannot make or open it.
    """
    decoding = all_gather_json(decodes)
    first = next((rank for rank in local.ranks if decoding[rank]), None)
    makes = dist.get_rank() == first
    memory, facts, error = None, None, None
    if makes:
        try:
            memory, facts = make()
        except (DataError, OSError) as refused:
            error = str(refused)
    made = all_gather_json([memory.path if memory else None, facts, error])
    refuse_any(one[-1] for one in made)
    if decodes and not makes:
        assert first is not None, "this rank is one of those that decode"
        path, facts, _ = made[first]
        try:
            if path is None:
                raise DataError(f"this system cannot share memory between ranks: {otherwise}, or start one rank")
            memory = opened(path, facts)
        except DataError as refused:
            error = f"rank {dist.get_rank()}: {refused}"
    refuse_any(all_gather_json(error))
    return memory, made[decoding.index(True)][1]


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
    limit = int(most * len(local.ranks) / local.size)
    if limit < _LEAST:
        raise DataError(f"{size(limit)} of memory are too few to cache images: set data.cache to none")
    return limit


def _message(limit: int, whole: int) -> str:
    words = f"decoded images are cached: about {size(whole)}, in at most {size(limit)} of a machine's memory"
    return f"{words}; the rest is decoded every epoch" if whole > limit else words


def refuse_any(errors: Iterable[str | None]) -> None:
    """Raise DataError with the first error of a rank, if there is one."""
    for error in errors:
        if error is not None:
            raise DataError(error)
