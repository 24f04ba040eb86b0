"""Decoded images that the ranks of a machine keep together: in a cache, or held for augmentation in batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from helpers.ranks import Ranks
from helpers.small_data import damage, pack_small
from helpers.trained import recipe_of
from vitpar.data.images import decode
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import DataError
from vitpar.launch.local_ranks import LocalRanks
from vitpar.launch.world_group import barrier
from vitpar.tasks import image_cache
from vitpar.tasks.image_cache import hold_images, make_cache

IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
BOTH = (0, 1)


def made(
    device: torch.device, data: Path, near: bool, decoding: tuple[int, ...], gb: float | None, fails: bool = False
) -> tuple[Any, ...]:
    """Make a cache on two ranks, store an image on the last that decodes, and return what this rank then has.

    The machine has 1 GB of memory.

    near: whether the ranks are in one container.
    decoding: ranks that decode.
    fails: whether rank 1 cannot open the cache of rank 0.
    """
    rank = dist.get_rank()
    local = LocalRanks(BOTH if near else (rank,), 2, 1.0)
    image_cache.available_memory = lambda: 10**9
    sets = [ShardSet.open(data, split) for split in ("train", "val")]
    if fails:
        image_cache.ImageCache = lambda *args: refuse(args)  # type: ignore[assignment, misc]
    recipe = recipe_of(data, "dp2", **{"data.cache": "memory", "data.cache_gb": gb})
    try:
        cache, message = make_cache(recipe, local, sets)
    except DataError as error:
        return ("refused", str(error))
    finally:
        image_cache.ImageCache, image_cache.available_memory = ImageCache, available_memory  # type: ignore[misc]
    if rank == max(decoding):
        cache.part(1).put(2, IMAGE)
    barrier()
    found, room = cache.part(1).get(2), cache._units * 256
    barrier()
    return (message, room, found is not None and np.array_equal(found, IMAGE))


ImageCache, available_memory = image_cache.ImageCache, image_cache.available_memory


def refuse(args: tuple[Any, ...]) -> Any:
    if len(args) == 3:
        raise DataError("there is no such file")
    return ImageCache(*args)


@pytest.mark.parametrize(
    ("near", "decoding", "gb", "rooms", "found"),
    [
        (True, BOTH, 0.0024, [2_400_000, 2_400_000], [True, True]),
        (True, (1,), 0.0024, [2_400_000, 2_400_000], [True, True]),
        (False, BOTH, 0.0024, [1_199_872, 1_199_872], [False, True]),
        (True, BOTH, None, [500_000_000, 500_000_000], [True, True]),
    ],
)
def test_ranks_of_a_container_have_one_cache(
    ranks: Ranks,
    data: Path,
    near: bool,
    decoding: tuple[int, ...],
    gb: float | None,
    rooms: list[int | None],
    found: list[bool],
) -> None:
    """Containers of one machine divide its memory."""
    results = ranks(2).run(made, data, near, decoding, gb)
    assert len({message for message, *_ in results}) == 1
    assert results[0][0].startswith("decoded images are cached: about 0.0266 MB, in at most ")
    assert [room for _, room, _ in results] == rooms and [same for *_, same in results] == found


@pytest.mark.parametrize(
    ("gb", "fails", "message"),
    [
        (2, False, "data.cache_gb is 2, but 1 GB of memory are available: set a smaller number, or"),
        (1e-6, False, "are too few to cache images: set data.cache to none"),
        (0.002, True, "rank 1: there is no such file"),
    ],
)
def test_failure_of_one_rank_is_reported_by_all(ranks: Ranks, data: Path, gb: float, fails: bool, message: str) -> None:
    results = ranks(2).run(made, data, True, BOTH, gb, fails)
    assert [kind for kind, *_ in results] == ["refused", "refused"]
    assert all(message in words for _, words in results), results


def held(device: torch.device, data: Path, decoding: tuple[int, ...], available: int) -> Any:
    """Hold the images on two ranks of a machine with `available` memory.

    Return the message, and the sums of both sets' pixels after the last rank that takes images has changed one of them.
    """
    rank = dist.get_rank()
    image_cache.available_memory = lambda: available
    train, val = (ShardSet.open(data, split) for split in ("train", "val"))
    try:
        images, message = hold_images(
            train, val, EvalTransform(6), LocalRanks(BOTH, 2, 1.0), device, 1, rank in decoding
        )
    except DataError as error:
        return str(error)
    finally:
        image_cache.available_memory = available_memory
    barrier()
    if rank == max(decoding):
        assert images is not None
        images[0][3].zero_()
    barrier()
    return message, images and [int(one.sum()) for one in images]


@pytest.mark.parametrize("decoding", [BOTH, (1,)])
def test_ranks_of_a_machine_hold_images_together(ranks: Ranks, data: Path, decoding: tuple[int, ...]) -> None:
    """Each decodes a part, into one memory. Validation images are transformed, with a black one after them."""
    train, val = (ShardSet.open(data, split) for split in ("train", "val"))
    sums = [
        sum(int(decode(train.read(i)).sum()) for i in range(len(train)) if i != 3),
        sum(int(EvalTransform(6)(decode(val.read(i))).sum()) for i in range(len(val))),
    ]
    words = "images are held in one memory of a machine's ranks, 0.0124 MB, and augmented there in batches"
    results = ranks(2).run(held, data, decoding, 10**9)
    assert results == [(words, sums if rank in decoding else None) for rank in BOTH]


def test_images_that_cannot_be_held_are_refused_by_all(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    (message,) = set(ranks(2).run(held, data, BOTH, 20_000))
    assert message.startswith(
        "data.cache 'device' holds all images, 0.0124 MB decoded, but 0.02 MB of memory are avail"
    )
    broken = pack_small(tmp_path)
    name = damage(broken, "val", 5)
    (message,) = set(ranks(2).run(held, broken, BOTH, 10**9))
    assert f"sample '{name}'" in message and message.endswith("; replace it")
