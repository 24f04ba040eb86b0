"""The tables of `bench_data.py` about the cost of input in cores, and about the cache of decoded images.

Rates are per second of CPU time of one thread that does all the work, so other programs on the machine matter little.
"""

import io
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich import box
from rich.table import Table

from bench.loaders import BATCH, SIZE
from vitpar.data import (
    CachedSet,
    ImageCache,
    Reencode,
    SampleOrder,
    ShardSet,
    TrainLoader,
    TrainTransform,
    decoded_bytes,
    pack,
    parse_policy,
)

# Model, batch and milliseconds of a step in bf16 on an H200 as `dry_bench.py` estimates them (dry_bench_2026-11-25.md),
# first as `gpu_models.py` predicts it.
STEPS = (("B/16", 512, 122.0), ("B/16", 512, 141.6), ("L/16", 256, 228.8), ("H/14", 128, 306.0), ("g/14", 128, 473.1))
POLICY = "rand-m10-n2-p1"
"""The policy of `imagenet_vit_small.toml`. Its mixup is computed on the device."""
SIDES = (320, 256)
"""Shorter sides of re-encoded images."""
ROUNDS, SECONDS = 3, 1.0
SMALL = 4000  # images that are made up where no small data set is given


def cores(folder: Path) -> tuple[Table, Any]:
    """Measure images/s of a core by the size of stored images, and the cores that a GPU then needs for each model."""
    sets = {"published": ShardSet.open(folder / "packed", "train")}
    for side in SIDES:
        place = folder / f"packed-{side}"
        pack(folder / "source", place, val_fraction=0, shard_samples=100, reencode=Reencode(side))
        sets[f"{side} px"] = ShardSet.open(place, "train")
    transforms = {
        "crop, flip": TrainTransform(SIZE),
        "RandAugment too": TrainTransform(SIZE, policy=parse_policy(POLICY)),
    }
    sources: dict[str, tuple[ShardSet, CachedSet | None]] = {name: (shards, None) for name, shards in sets.items()}
    for name, shards in sets.items():
        cache = ImageCache([len(shards)], 2 * decoded_bytes(shards)).part(0)
        sources[f"{name}, cached"] = shards, cache
    streams = {
        (name, augmented): _batches(shards, transform, cache)
        for name, (shards, cache) in sources.items()
        for augmented, transform in transforms.items()
    }
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in streams}
    for key, stream in streams.items():  # fills caches
        shards = sources[key[0]][0]
        list(islice(stream, len(shards) // BATCH + 2))
    for _ in range(ROUNDS):
        for key, stream in streams.items():
            rates[key].append(_rate(stream))
    wanted = [batch / ms * 1e3 for _, batch, ms in STEPS]
    heads = [f"{name} {rate:,.0f}/s" for (name, *_), rate in zip(STEPS, wanted, strict=True)]
    table = Table("stored images", "kB", "augmentation", "images/s", "spread", *heads, box=box.MARKDOWN)
    for (name, augmented), values in rates.items():
        shards, cache = sources[name]
        middle = statistics.median(values)
        kilobytes = (decoded_bytes(shards) if cache else shards.bytes) / len(shards) / 1e3
        table.add_row(
            name,
            f"{kilobytes:,.0f}",
            augmented,
            f"{middle:,.0f}",
            f"{min(values):,.0f} to {max(values):,.0f}",
            *(f"{rate / middle:.1f}" for rate in wanted),
        )
    return table, [{"stored": key[0], "augmentation": key[1], "images_per_second": rates[key]} for key in rates]


def cache(folder: Path) -> tuple[Table, Any]:
    """Measure the first and second epoch with the cache of decoded images and without."""
    small = folder / "small"
    if not small.exists():
        _write_small(folder / "small-source")
        pack(folder / "small-source", small, val_fraction=0)
    sets = {
        f"{len(shards):,} images of {side} pixels": (shards, TrainTransform(side, scale=(scale, 1.0)))
        for shards, side, scale in (
            (ShardSet.open(small, "train"), 32, 0.4),
            (ShardSet.open(folder / "packed", "train"), SIZE, 0.08),
        )
    }
    table = Table("", "cache", "images/s of a core, epoch 1", "epoch 2", "GB for it", box=box.MARKDOWN)
    found = []
    for name, (shards, transform) in sets.items():
        for kind in ("none", "memory"):
            epochs: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                kept = ImageCache([len(shards)], 2 * decoded_bytes(shards)) if kind == "memory" else None
                stream = _batches(shards, transform, kept.part(0) if kept else None)
                for rates in epochs:
                    rates.append(_epoch(stream, len(shards)))
            first, second = (statistics.median(rates) for rates in epochs)
            used = f"{kept.stored / 1e9:.2f}" if kept else ""
            table.add_row(name, kind, f"{first:,.0f}", f"{second:,.0f}", used)
            found.append({"images": name, "cache": kind, "epochs": epochs})
    return table, found


def _batches(shards: ShardSet, transform: TrainTransform, cache: CachedSet | None) -> Iterator[int]:
    """Yield the number of images of each batch, decoded in the thread that asks."""
    order = SampleOrder(0, len(shards))
    for batch in TrainLoader(shards, transform, order=order, batch_size=BATCH, workers=0, cache=cache):
        yield len(batch.labels)


def _rate(stream: Iterator[int]) -> float:
    """Return images per second of CPU time, over at least SECONDS of it."""
    begun, done = time.process_time(), 0
    while time.process_time() - begun < SECONDS:
        done += next(stream)
    return done / (time.process_time() - begun)


def _epoch(stream: Iterator[int], samples: int) -> float:
    """Return images per second of CPU time over the next `samples` images, rounded down to batches."""
    begun = time.process_time()
    done = sum(islice(stream, samples // BATCH))
    return done / (time.process_time() - begun)


def _write_small(folder: Path) -> None:
    (folder / "a").mkdir(parents=True)
    draws = np.random.default_rng(0)
    for number in range(SMALL):
        pixels = draws.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((32, 32)).save(file, "JPEG")
        (folder / "a" / f"{number}.jpg").write_bytes(file.getvalue())


TABLES: dict[str, Callable[[Path], tuple[Table, Any]]] = {"cores": cores, "cache": cache}
