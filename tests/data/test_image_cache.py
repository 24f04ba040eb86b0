"""Cache of decoded images: batches as without it, one copy for all ranks of a machine, and bounded memory."""

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.small_data import damage, first
from helpers.small_data import pack_small as packed_small
from vitpar.data.cache import ImageCache, decoded_bytes
from vitpar.data.images import decode
from vitpar.data.loader import Batch, EvalLoader, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError

# Some crops are not resized, so that their pixels are views of the cached image.
TRAIN, EVAL = TrainTransform(10, scale=(0.5, 1.0), erase=0.5), EvalTransform(10, crop_pct=1.0)
ROOM = 1 << 20


def counted(shards: ShardSet) -> list[int]:
    """Return a list that gets the number of every image that is read."""
    read, original = [], shards.read
    shards.read = lambda i: (read.append(i), original(i))[1]  # type: ignore[method-assign]
    return read


def batches(shards: ShardSet, steps: int, **settings: object) -> list[Batch]:
    """Return the first batches of 7 of a training."""
    loader = TrainLoader(shards, TRAIN, order=SampleOrder(3, len(shards)), batch_size=7, **settings)  # type: ignore[arg-type]
    return first(loader, steps)


def assert_same(cached: list[Batch], plain: list[Batch], rows: slice = slice(None)) -> None:
    for a, b in zip(cached, plain, strict=True):
        assert a.images is not None and b.images is not None
        assert torch.equal(a.images, b.images[rows])
        assert torch.equal(a.labels, b.labels) and torch.equal(a.keys, b.keys)


@pytest.mark.parametrize("workers", [0, 3])
def test_cached_images_are_read_once_and_give_the_same_batches(packed: Path, workers: int) -> None:
    train, val = ShardSet.open(packed, "train"), ShardSet.open(packed, "val")
    plain, plain_eval = batches(train, 12), list(EvalLoader(val, EVAL, batch_size=4))
    read, read_eval = counted(train), counted(val)
    cache = ImageCache((len(train), len(val)), ROOM)
    assert_same(batches(train, 12, cache=cache.part(0), workers=workers), plain)
    for _ in range(2):
        assert_same(list(EvalLoader(val, EVAL, batch_size=4, cache=cache.part(1), workers=workers)), plain_eval)
    # Threads that are batches ahead may decode the same image at once.
    assert set(read) == set(range(21)) and sorted(read_eval) == list(range(9)) and (workers or len(read) == 21)
    read.clear()
    assert_same(batches(train, 12, cache=cache.part(0), workers=workers), plain)
    assert not read
    for shards, part in ((train, cache.part(0)), (val, cache.part(1))):
        for i in range(len(shards)):
            assert np.array_equal(part.get(i), decode(shards.read(i))), "a transform wrote to a cached image"
    # A resumed run begins with an empty cache, in the middle of an epoch.
    assert_same(batches(train, 7, cache=ImageCache([21], ROOM).part(0), workers=workers, start=35), plain[5:])


def test_ranks_of_a_machine_share_what_they_decode(packed: Path) -> None:
    """In the second epoch, each of three ranks reads nothing, although the others decoded most of its images."""
    train = ShardSet.open(packed, "train")
    plain, read = batches(train, 9), counted(train)
    whole = ImageCache([21], ROOM)
    ranks = [whole, *(ImageCache([21], ROOM, whole.path) for _ in range(2))]
    parts = [range(0, 3), range(3, 5), range(5, 7)]
    for rows, cache in zip(parts, ranks, strict=True):
        mine = batches(train, 3, cache=cache.part(0), rows=rows)
        assert_same(mine, plain[:3], slice(rows.start, rows.stop))
    assert {*read} == {*range(21)}  # a loader that is closed may have begun to read ahead
    read.clear()
    for rows, cache in zip(parts, ranks, strict=True):
        mine = batches(train, 9, cache=cache.part(0), rows=rows)
        assert_same(mine, plain, slice(rows.start, rows.stop))
    assert not read


def test_another_process_opens_the_cache(packed: Path) -> None:
    cache = ImageCache([3, 2], ROOM)
    program = """if True:
        import sys
        import numpy as np
        from vitpar.data.cache import ImageCache
        cache = ImageCache([3, 2], 1 << 20, sys.argv[1])
        assert np.array_equal(cache.part(0).get(2), np.full((4, 5, 3), 7, np.uint8))
        cache.part(1).put(1, np.full((70, 1, 3), 9, np.uint8))
    """
    cache.part(0).put(2, np.full((4, 5, 3), 7, np.uint8))
    done = subprocess.run([sys.executable, "-c", program, str(cache.path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.array_equal(cache.part(1).get(1), np.full((70, 1, 3), 9, np.uint8))
    assert cache.part(1).get(0) is None and cache.get(4) is not None


def test_a_full_cache_keeps_what_it_has_and_decodes_the_rest(packed: Path) -> None:
    train = ShardSet.open(packed, "train")
    plain, read = batches(train, 9), counted(train)
    cache = ImageCache([21], 5 * 512)  # an image of 360 bytes takes two units of 256
    assert_same(batches(train, 9, cache=cache.part(0), workers=2), plain)
    held = [i for i in range(21) if cache.get(i) is not None]
    assert len(held) == 5 and cache.stored == 5 * 512
    read.clear()
    assert_same(batches(train, 9, cache=cache.part(0), workers=0), plain)
    assert sorted(read) == sorted(3 * [i for i in range(21) if i not in held])


def image(i: int, side: int = 40) -> NDArray[np.uint8]:
    draws = np.random.default_rng(i)
    return draws.integers(0, 256, (*draws.integers(1, side, 2), 3), dtype=np.uint8)


def test_threads_and_ranks_that_store_at_once_do_not_overwrite_each_other() -> None:
    """Four ranks with two threads each store the same 300 images of many sizes, in different orders."""
    whole = ImageCache([300], 600_000)
    ranks = [whole, *(ImageCache([300], 600_000, whole.path) for _ in range(3))]
    wrong: list[int] = []
    begin = threading.Barrier(8)

    def work(rank: ImageCache, seed: int) -> None:
        begin.wait()
        for i in np.random.default_rng(seed).permutation(300).tolist():
            found = rank.get(i)
            if found is None:
                rank.put(i, image(i))
            elif not np.array_equal(found, image(i)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(ranks[n % 4], n)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [i for i in range(300) if whole.get(i) is not None]
    assert not wrong and len(held) > 200
    assert all(np.array_equal(ranks[2].get(i), image(i)) for i in held)
    assert whole.stored == sum(-(-image(i).nbytes // 256) * 256 for i in held), "each is stored once"


def test_images_longer_than_an_entry_can_say_are_not_cached() -> None:
    part = ImageCache([2], ROOM).part(0)
    part.put(0, np.zeros((1, 65536, 3), np.uint8))
    part.put(1, np.full((65535, 1, 3), 3, np.uint8))
    found = part.get(1)
    assert part.get(0) is None and found is not None and found.shape == (65535, 1, 3) and found.min() == 3


def test_memory_is_taken_as_images_are_stored_and_returned_with_the_cache() -> None:
    cache = ImageCache([4], 1 << 34)
    path = cache.path

    def used() -> int:
        return os.stat(path).st_blocks * 512

    assert used() < 1 << 16
    cache.put(0, np.ones((600, 600, 3), np.uint8))
    assert 600 * 600 * 3 <= used() < 600 * 600 * 3 + (1 << 22)
    number = os.stat(path).st_ino
    del cache
    assert not os.path.exists(path) or os.stat(path).st_ino != number


def test_storing_waits_for_other_ranks() -> None:
    cache = ImageCache([2], ROOM)
    cache.put(0, image(0))
    with Path(cache.path).open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        storing = threading.Thread(target=cache.put, args=(1, image(1)))
        storing.start()
        storing.join(0.2)
        assert storing.is_alive() and cache.get(1) is None
        assert cache.get(0) is not None, "reading waits for nobody"
    storing.join()
    found = cache.get(1)
    assert found is not None and np.array_equal(found, image(1))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_are_found_in_every_epoch(tmp_path: Path, workers: int) -> None:
    data = packed_small(tmp_path)
    name = damage(data, "train", 4)
    train = ShardSet.open(data, "train")
    cache = ImageCache([35], ROOM).part(0)
    loader = TrainLoader(
        train, TRAIN, order=SampleOrder(0, 35), batch_size=35, workers=workers, bad_sample="skip", cache=cache
    )
    found = iter(loader)
    assert [int((next(found).labels == -1).sum()) for _ in range(3)] == [1, 1, 1]
    found.close()
    assert loader.skipped.times >= 3 and name in loader.skipped.problems[0] and cache.get(4) is None
    with pytest.raises(DataError, match="its checksum differs"):
        batches(train, 10, cache=cache, workers=workers)


def test_caches_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    cache = ImageCache([3], ROOM)
    with pytest.raises(DataError, match="has another size: start all ranks with the same recipe and data"):
        ImageCache([3], 2 * ROOM, cache.path)
    gone = cache.path
    del cache
    with pytest.raises(DataError, match=r"cannot be opened \(No such file or directory\): set data.cache to none"):
        ImageCache([3], ROOM, gone)


def test_estimate_of_decoded_bytes(packed: Path) -> None:
    assert decoded_bytes(ShardSet.open(packed, "train")) == 21 * 512, "360 bytes take two units of 256"


def test_without_memory_images_are_decoded_as_before(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> int:
        raise OSError("Cannot allocate memory")

    train = ShardSet.open(packed, "train")
    cache = ImageCache([21], ROOM)
    cache.put(3, decode(train.read(3)))
    monkeypatch.setattr(os, "pwrite", fails)
    assert_same(batches(train, 6, cache=cache.part(0)), batches(train, 6))
    assert [i for i in range(21) if cache.get(i) is not None] == [3]
