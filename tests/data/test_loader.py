"""Data loader: the same global order and pixels under every plan, and handling of bad samples."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.small_data import first
from vitpar.data.images import decode
from vitpar.data.loader import EvalLoader
from vitpar.data.loader import TrainLoader as Loader
from vitpar.data.randomness import SampleOrder, hash_numbers
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.policies import parse_policy
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError
from vitpar.models import IGNORED

TRAIN, EVAL = TrainTransform(8), EvalTransform(8)


@pytest.fixture(scope="module")
def train(packed):
    return ShardSet.open(packed, "train")


@pytest.fixture(scope="module")
def val(packed):
    return ShardSet.open(packed, "val")


@pytest.fixture
def damaged(packed, tmp_path):
    """Copy the data, and damage training samples 4 and 11 and validation sample 2."""
    folder = shutil.copytree(packed, tmp_path / "packed")
    for split, i in (("train", 4), ("train", 11), ("val", 2)):
        shards = ShardSet.open(folder, split)
        path, data = folder / shards.name(i).split("/")[0], shards.read(i)
        path.write_bytes(path.read_bytes().replace(data, data[:20] + b"\0" * (len(data) - 20)))
    return folder


def TrainLoader(shards, transform, *, seed=0, **settings):
    """Return a loader with the default sample order."""
    return Loader(shards, transform, order=SampleOrder(seed, len(shards)), **settings)


def joined(loaders, steps, field):
    """Return `field` of the first `steps` global batches, concatenated from the loaders of all ranks."""
    parts = [[getattr(batch, field) for batch in first(loader, steps)] for loader in loaders]
    return torch.cat([torch.cat(ranks) for ranks in zip(*parts, strict=True)])


@pytest.mark.parametrize(("parts", "workers"), [(1, 1), (1, 3), (2, 0), (3, 2), (6, 0), (6, 1)])
def test_order_and_pixels_do_not_depend_on_the_plan(train, parts, workers):
    """Losses of different plans are comparable only if every sample is the same in each of them."""
    steps = 8  # 48 samples: more than two epochs, one of them ending inside a batch
    alone = first(TrainLoader(train, TRAIN, batch_size=6, seed=1, workers=0), steps)
    for part in range(parts):
        rows = list(range(part, 6, parts))
        here = first(TrainLoader(train, TRAIN, batch_size=6, rows=rows, seed=1, workers=workers), steps)
        for a, b in zip(alone, here, strict=True):
            assert torch.equal(a.images[rows], b.images)
            assert torch.equal(a.labels, b.labels) and torch.equal(a.keys, b.keys)


def test_keys_differ_between_epochs_and_pixels_match_samples(train):
    keys = joined([TrainLoader(train, TRAIN, batch_size=7)], 6, "keys")
    assert len(set(keys.tolist())) == 42
    other = joined([TrainLoader(train, TRAIN, batch_size=7, seed=1)], 6, "keys")
    assert not set(keys.tolist()) & set(other.tolist())
    whole = TrainTransform(8, scale=(1, 1), ratio=(1, 1), flip=0)
    batch = next(iter(TrainLoader(train, whole, batch_size=21)))
    order = SampleOrder(0, 21).batch(0, 21)[1]
    assert batch.labels.tolist() == train.labels[order].tolist()
    plain = torch.cat([b.images for b in EvalLoader(train, EvalTransform(8, crop_pct=1.0), batch_size=21)])[order]
    distance = (batch.images[:, None].float() - plain[None].float()).abs().mean((2, 3, 4))
    assert distance.argmin(1).tolist() == list(range(21))


def test_repeats_of_a_sample_have_different_keys(train):
    order = SampleOrder(0, len(train), repeats=3)
    batch = next(iter(Loader(train, TRAIN, order=order, batch_size=12)))
    assert len(set(batch.keys.tolist())) == 12
    assert all(len(set(batch.labels[start : start + 3].tolist())) == 1 for start in range(0, 12, 3))
    # 4 samples, each with 3 different augmentations.
    assert len({image.numpy().tobytes() for image in batch.images}) > 8


@pytest.mark.parametrize(("device", "workers"), [("cpu", 0), ("cpu", 2), ("meta", 2)])
def test_views_are_crops_of_one_decoded_image(train, monkeypatch, device, workers):
    """The first is that of a loader of one view, and the others have a size and random numbers of their own."""
    small = TrainTransform(6, scale=(0.1, 0.4), policy=parse_policy("rand-p1"), erase=0.5)
    read, original = [], ShardSet.read
    monkeypatch.setattr(ShardSet, "read", lambda self, i: (read.append(i), original(self, i))[1])
    rows = [5, 2, 3]
    loader = TrainLoader(
        train, [TRAIN, small, small], batch_size=7, rows=rows, workers=workers, device=torch.device(device)
    )
    batch = next(iter(loader))
    # Threads may read images of later batches before the last one of this batch.
    assert all(read.count(i) == 1 for i in SampleOrder(0, 21).batch(0, 7)[1][rows].tolist()), "each image is read once"
    assert torch.equal(batch.images, next(iter(TrainLoader(train, TRAIN, batch_size=7, rows=rows))).images)
    others = [one.made() if device == "meta" else one for one in batch.further]
    samples, keys = SampleOrder(0, 21).batch(0, 7)[1][rows], batch.keys.numpy()[rows]
    pictures = [decode(original(train, int(i))) for i in samples]
    for view, found in enumerate(others, start=1):
        own = (hash_numbers(0x71E3, keys, view) >> np.uint64(1)).astype(np.int64)
        assert torch.equal(found, small(pictures, own)) and found.shape == (3, 3, 6, 6)
    assert batch.size == 8 and not torch.equal(*others)


def test_start_continues_where_another_loader_stopped(train):
    whole = first(TrainLoader(train, TRAIN, batch_size=4), 9)
    rest = first(TrainLoader(train, TRAIN, batch_size=4, start=20), 4)
    for a, b in zip(whole[5:], rest, strict=True):
        assert torch.equal(a.images, b.images) and torch.equal(a.keys, b.keys)
        assert (a.samples, a.epoch) == (b.samples, b.epoch)
    assert (rest[0].samples, rest[0].epoch) == (24, 24 / 21)


def test_ranks_without_images_open_no_shard(packed, monkeypatch):
    """Ranks that take no images, such as later pipeline stages, need only labels and keys."""
    train, val = ShardSet.open(packed, "train"), ShardSet.open(packed, "val")
    full = first(TrainLoader(train, TRAIN, batch_size=6), 5)
    full_eval = list(EvalLoader(val, EVAL, batch_size=4))
    monkeypatch.setattr(ShardSet, "read", lambda self, i: pytest.fail("a shard was read"))
    monkeypatch.setattr("os.open", lambda *args: pytest.fail("a file was opened"))
    for a, b in zip(full, first(TrainLoader(train, TRAIN, batch_size=6, rows=()), 5), strict=True):
        assert b.images is None and torch.equal(a.labels, b.labels) and torch.equal(a.keys, b.keys)
    for a, b in zip(full_eval, EvalLoader(val, EVAL, batch_size=4, rows=()), strict=True):
        assert b.images is None and torch.equal(a.labels, b.labels)


@pytest.mark.parametrize(("parts", "batch_size"), [(1, 9), (1, 4), (2, 4), (4, 4), (4, 8), (4, 40)])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_covers_every_sample_once(val, parts, batch_size, workers):
    local = batch_size // parts
    rows = [range(part * local, (part + 1) * local) for part in range(parts)]
    loaders = [EvalLoader(val, EVAL, batch_size=batch_size, rows=mine, workers=workers) for mine in rows]
    ranks = [list(loader) for loader in loaders]
    assert {len(batches) for batches in ranks} == {len(loaders[0])} == {-(-9 // batch_size)}
    assert {tuple(b.images.shape) for batches in ranks for b in batches} == {(local, 3, 8, 8)}
    for batches in ranks:
        labels = torch.cat([b.labels for b in batches])
        assert labels[:9].tolist() == val.labels.tolist() and (labels[9:] == IGNORED).all()
    images = torch.cat([torch.cat([b.images for b in step]) for step in zip(*ranks, strict=True)])
    alone = torch.cat([b.images for b in EvalLoader(val, EVAL, batch_size=9, workers=0)])
    assert torch.equal(images[:9], alone) and not images[9:].any()


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_sample_error_names_the_sample(damaged, workers):
    shards = ShardSet.open(damaged, "train")
    message = r"sample 'train-00000[01].tar/000000(04|11)' of '.*packed': its checksum differs from the index"
    with pytest.raises(DataError, match=message):
        first(TrainLoader(shards, TRAIN, batch_size=21, workers=workers), 1)
    assert not decoding_threads()


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_bad_sample_is_counted_and_named(damaged, workers):
    shards = ShardSet.open(damaged, "train")
    loader = TrainLoader(shards, TRAIN, batch_size=7, workers=workers, bad_sample="skip")
    batches = first(loader, 6)
    problems = "; ".join(loader.skipped.problems)
    assert loader.skipped.times == 4 and len(loader.skipped.problems) == 2, "two images, met twice each"
    assert shards.name(4) in problems and shards.name(11) in problems and "its checksum differs" in problems
    order = SampleOrder(0, 21).batch(0, 42)[1]
    labels = torch.cat([b.labels for b in batches])
    bad = torch.from_numpy(np.isin(order, (4, 11)))
    assert torch.equal(labels == IGNORED, bad)
    assert labels[~bad].tolist() == shards.labels[order[~bad.numpy()]].tolist()
    images = torch.cat([b.images for b in batches])
    assert not images[bad].any() and images[~bad].flatten(1).any(1).all()
    val = EvalLoader(ShardSet.open(damaged, "val"), EVAL, batch_size=9, bad_sample="skip")
    assert (next(iter(val)).labels == IGNORED).nonzero().flatten().tolist() == [2] and val.skipped.times == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_missing_shard_is_never_skipped(damaged, workers):
    """data.bad_sample=skip is for single bad images. A lost file would silently remove a part of the data."""
    shards = ShardSet.open(damaged, "train")
    for path in damaged.glob("*.tar"):
        path.unlink()
    with pytest.raises(DataError, match=r"^shard '.*tar' is missing: restore it"):
        first(TrainLoader(shards, TRAIN, batch_size=7, workers=workers, bad_sample="skip"), 1)


def decoding_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vitpar-ahead")]


def test_closing_or_dropping_the_iterator_stops_its_threads(train):
    batches = iter(TrainLoader(train, TRAIN, batch_size=8, workers=3))
    next(batches)
    assert decoding_threads()
    batches.close()
    assert not decoding_threads()
    for _ in TrainLoader(train, TRAIN, batch_size=8, workers=3):
        break
    assert not decoding_threads()
    list(EvalLoader(train, EVAL, batch_size=8, workers=3))
    assert not decoding_threads()


def test_program_with_an_unclosed_loader_still_exits(packed):
    """Decoding threads must not keep the interpreter alive."""
    program = """if True:
        import sys
        from vitpar.data.loader import TrainLoader
        from vitpar.data.randomness import SampleOrder
        from vitpar.data.shards.shard_set import ShardSet
        from vitpar.data.transforms.sample import TrainTransform
        shards, order = ShardSet.open(sys.argv[1], "train"), SampleOrder(0, 21)
        batches = iter(TrainLoader(shards, TrainTransform(8), order=order, batch_size=64, workers=3))
        next(batches)
    """
    done = subprocess.run([sys.executable, "-c", program, str(packed)], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_decoding_thread_starts_no_threads():
    """A team of OpenMP threads for each of 15 decoding threads would take the cores from all of them."""
    program = """if True:
        import os, threading
        import numpy as np
        import torch
        from vitpar.data.transforms.policies import parse_policy
        from vitpar.data.transforms.sample import EvalTransform, TrainTransform
        from vitpar.threads import compute_alone
        image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
        train, wide = TrainTransform(256, flip=1.0, erase=1.0, color_jitter=(0.4, 0.4, 0.4)), image[:200]
        padded, keys = TrainTransform(256, flip=1.0, padding=200, policy=parse_policy("rand-p1")), np.arange(20)
        def transform():
            for interpolation in ("bicubic", "bilinear", "lanczos"):
                for mode in ("center", "squash", "border"):
                    EvalTransform(384, 0.9, interpolation, mode)(wide)
                EvalTransform(480, 1.0, interpolation)(image)
            compute_alone()
            alone.set()
            reset.wait()
            for transform in (train, padded):
                transform([image] * 20, keys)
            found.append(len(os.listdir("/proc/self/task")))
        torch.set_num_threads(4)
        found = [len(os.listdir("/proc/self/task"))]
        alone, reset, thread = threading.Event(), threading.Event(), threading.Thread(target=transform)
        thread.start()
        alone.wait()
        torch.set_num_threads(4)
        reset.set()
        thread.join()
        print(found[1] - found[0])
    """
    done = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr
