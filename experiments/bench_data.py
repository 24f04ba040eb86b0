"""Measure how many images a core reads, and the cores that a GPU needs for models; compared with webdataset and Pillow.

    python experiments/bench_data.py                               # two minutes; made-up images
    python experiments/bench_data.py --images PATH/TO/JPEGS        # your own; a few hundred suffice

Every row reads, decodes, crops to 224 pixels, flips and batches images in one thread, from shards as published, with a
shorter side, or from the cache of decoded images. Rows take turns. Rates are per second of CPU time, so other programs
matter little. Cores are those for the steps that `bench/gpu_models.py` predicts on an H200.
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor

from bench.gpu_models import MODELS, predicted_seconds
from bench.harness import Report, Spread, parser, turns
from bench.photographs import write_photographs
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

SIZE, BATCH, ROUNDS, SECONDS = 224, 64, 5, 1.0
TRANSFORMS = {
    "crop, flip": TrainTransform(SIZE),
    "RandAugment too": TrainTransform(SIZE, policy=parse_policy("rand-m10-n2-p1")),
}
"""Augmentation by name; the policy is that of `imagenet_vit_small.toml`. Its mixup is computed on the device."""
SIDE = 256
"""Shorter side of re-encoded images."""


def main() -> int:
    """Read the options, measure and print the table."""
    options = parser(__doc__)
    options.add_argument("--images", type=Path, metavar="FOLDER", help="JPEG files, also in folders (made up)")
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        images = folder / "source" / "train"
        if given.images is None:
            write_photographs(folder / "source", 400)
        else:
            found = [path for path in given.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")]
            (images / "a").mkdir(parents=True)
            for number, path in enumerate(found):
                shutil.copy(path, images / "a" / f"{number}.jpg")
        pack(images, folder / "packed", val_fraction=0, shard_samples=100)
        pack(images, folder / "small", val_fraction=0, shard_samples=100, reencode=Reencode(SIDE))
        published, small = (ShardSet.open(folder / name, "train") for name in ("packed", "small"))
        report = Report(given.json, images=f"{len(published)} of {published.bytes / len(published) / 1e3:.0f} kB")
        streams = {("as published", "webdataset, Pillow"): plain_webdataset(folder / "packed")}
        for name, shards, cached in (
            ("as published", published, False),
            (f"{SIDE} px", small, False),
            ("as published, cached", published, True),
        ):
            cache = ImageCache([len(shards)], 2 * decoded_bytes(shards)).part(0) if cached else None
            for augmented, transform in TRANSFORMS.items():
                streams[name, augmented] = batches(shards, transform, cache)
        for stream in streams.values():  # fills the cache
            list(itertools.islice(stream, len(published) // BATCH + 2))
        rounds = [*turns({key: partial(rate, stream) for key, stream in streams.items()}, ROUNDS)]
    wanted = {}
    for name, model in MODELS.items():
        batch = model.batches[0][1]
        wanted[name] = batch / (predicted_seconds(name, batch, "H200") or 1)
    heads = ("stored images", "augmentation", "images/s of a core", "vitpar over it")
    rows, ours = [], ("as published", "crop, flip")
    for key in streams:
        rates = [of_round[key] for of_round in rounds]
        over = Spread.of(of_round[ours] / of_round[key] for of_round in rounds).text(2)
        cores = (f"{rate / Spread.of(rates).middle:.1f}" for rate in wanted.values())
        rows.append([*key, Spread.of(rates).text(0), over if "Pillow" in key[1] else "", *cores])
    models = (f"cores for {name}, {rate:,.0f}/s" for name, rate in wanted.items())
    measured = [{"stored": key[0], "augmentation": key[1], "rates": [one[key] for one in rounds]} for key in streams]
    report.show("images of a core", (*heads, *models), rows, measured)
    return 0


def rate(stream: Iterator[int]) -> float:
    """Return images per second of CPU time, over at least SECONDS of it."""
    begun, done = time.process_time(), 0
    while time.process_time() - begun < SECONDS:
        done += next(stream)
    return done / (time.process_time() - begun)


def batches(shards: ShardSet, transform: TrainTransform, cache: CachedSet | None) -> Iterator[int]:
    """Yield the number of images of each batch, decoded in the thread that asks."""
    order = SampleOrder(0, len(shards))
    for batch in TrainLoader(shards, transform, order=order, batch_size=BATCH, workers=0, cache=cache):
        yield len(batch.labels)


def plain_webdataset(folder: Path) -> Iterator[int]:
    """Yield the number of images of each batch of webdataset as it documents it: shuffled, decoded with Pillow."""
    urls = [str(path) for path in sorted(folder.glob("train-*.tar"))]
    crop: Callable[[Image.Image], Tensor] = random_resized_crop
    stream = webdataset.WebDataset(urls, shardshuffle=100, empty_check=False).shuffle(1000).decode("pil")
    stream = stream.to_tuple("jpg", "cls").map_tuple(crop, int).batched(BATCH)
    for images, _ in itertools.chain.from_iterable(itertools.repeat(stream)):
        yield len(images)


def random_resized_crop(image: Image.Image) -> Tensor:
    """Apply torchvision's RandomResizedCrop, flip and ToTensor to a Pillow image: float32 [3, size, size]."""
    width, height = image.size
    box = (0, 0, width, height)
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            box = (left, top, left + w, top + h)
            break
    pixels = np.asarray(image.crop(box).resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    pixels = pixels[:, ::-1] if random.random() < 0.5 else pixels
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div(255)


if __name__ == "__main__":
    sys.exit(main())
