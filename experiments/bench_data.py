"""Measure how many images a core reads, and the cores that a GPU needs for models; compared with webdataset and Pillow.

    python experiments/bench_data.py                               # two minutes; made-up images
    python experiments/bench_data.py --images PATH/TO/JPEGS        # your own; a few hundred suffice
    python experiments/bench_data.py --small data_shards/cifar10   # only small images, a packed data set
    python experiments/bench_data.py --small data_shards/cifar10 --device cuda   # by the clock, on a GPU only

Small images come first: decoded, from the cache, or held as with data.cache 'device'. Then photographs:

Every row reads, decodes, crops to 224 pixels, flips and batches images in one thread, from shards as published, with a
shorter side, or from the cache of decoded images. Rows take turns. Rates are per second of CPU time, so other programs
matter little. Cores are those for the steps that `bench/gpu_models.py` predicts on an H200.

Where py-spy is installed, it looks 300 times a second which thread holds Python's lock while one thread decodes. The
lock can be held by one thread at a time, which limits the images a second of a process, whatever the cores.
"""

from __future__ import annotations

import itertools
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor

from bench.gpu_models import MODELS, predicted_seconds
from bench.harness import Report, Spread, parser, ratio, turns
from bench.photographs import write_photographs
from vitpar.data.cache import CachedSet, ImageCache, SharedPixels, decode_into, decoded_bytes, stored_shape
from vitpar.data.loader import Batch, TrainLoader
from vitpar.data.randomness import SampleOrder
from vitpar.data.shards.pack import Reencode, pack
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.drawn import DrawnBatch
from vitpar.data.transforms.policies import parse_policy
from vitpar.data.transforms.sample import TrainTransform

SIZE, BATCH, ROUNDS, SECONDS = 224, 64, 5, 1.0
RANDOM = TrainTransform(SIZE, policy=parse_policy("rand-m10-n2-p1"))
"""Augmentation of `imagenet_vit_small.toml`. Its mixup is computed on the device."""
TRANSFORMS = {
    "crop, flip": (TrainTransform(SIZE), torch.device("cpu")),
    "RandAugment too, for a GPU": (RANDOM, torch.device("meta")),
    "RandAugment too": (RANDOM, torch.device("cpu")),
}
"""Augmentation by name, and the device that takes the images: one that is not the CPU does what follows the crop."""
THREADS, SMALL_BATCH, SETTLING = 2, 512, 6
"""Threads of a loader of small images, its batch size, and the batches that it delivers before it is timed."""
LOOKS, SPIED = 300, 8
"""Looks of py-spy in a second, and seconds for which it looks."""
SIDE = 256
"""Shorter side of re-encoded images."""


def main() -> int:
    """Read the options, measure and print the table."""
    options = parser(__doc__)
    options.add_argument("--images", type=Path, metavar="FOLDER", help="JPEG files, also in folders (made up)")
    options.add_argument("--small", type=Path, metavar="FOLDER", help="packed images of one small size (made up)")
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="which changes small images (cpu)")
    options.add_argument("--decode", nargs=2, metavar=("FOLDER", "NAME"), help="only: decode packed images, for py-spy")
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.decode:
        folder, name = given.decode
        for number in batches(ShardSet.open(folder, "train"), name, workers=1):
            print(number, flush=True)
    report = Report(given.json)
    if given.device == "cuda":
        if given.small is None or not torch.cuda.is_available():
            options.error("--device cuda needs --small and a GPU: name packed images, or leave it out")
        small_images_on_gpu(report, given.small)
        return 0
    with tempfile.TemporaryDirectory() as place:
        if given.small is None:
            write_small(Path(place))
        small_images(report, given.small or Path(place) / "packed")
    if given.small is None or given.images is not None:
        photographs(report, given.images)
    return 0


def photographs(report: Report, given: Path | None) -> None:
    """Measure the images of a core.

    given: folder of JPEG files; None for made-up ones.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        images = folder / "source" / "train"
        if given is None:
            write_photographs(folder / "source", 400)
        else:
            found = [path for path in given.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")]
            (images / "a").mkdir(parents=True)
            for number, path in enumerate(found):
                shutil.copy(path, images / "a" / f"{number}.jpg")
        pack(images, folder / "packed", val_fraction=0, shard_samples=100)
        pack(images, folder / "small", val_fraction=0, shard_samples=100, reencode=Reencode(SIDE))
        published, small = (ShardSet.open(folder / name, "train") for name in ("packed", "small"))
        report.keep("images", f"{len(published)} of {published.bytes / len(published) / 1e3:.0f} kB")
        streams = {("as published", "webdataset, Pillow"): plain_webdataset(folder / "packed")}
        for name, shards, cached in (
            ("as published", published, False),
            (f"{SIDE} px", small, False),
            ("as published, cached", published, True),
        ):
            cache = ImageCache([len(shards)], 2 * decoded_bytes(shards)).part(0) if cached else None
            for augmented in TRANSFORMS:
                streams[name, augmented] = batches(shards, augmented, cache=cache)
        for stream in streams.values():  # fills the cache
            list(itertools.islice(stream, len(published) // BATCH + 2))
        rounds = [*turns({key: partial(rate, stream) for key, stream in streams.items()}, ROUNDS)]
        locks(report, folder / "packed")
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


def locks(report: Report, packed: Path) -> None:
    """Measure the share of its time for which a decoding thread holds Python's lock, and the ceiling that follows."""
    if (spy := shutil.which("py-spy")) is None:
        print("Python's lock is not measured: pip install py-spy", file=sys.stderr)
        return
    rows = []
    for name in TRANSFORMS:
        words = [sys.executable, __file__, "--decode", str(packed), name]
        with (
            tempfile.TemporaryDirectory() as place,
            subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as loader,
        ):
            assert loader.stdout is not None
            loader.stdout.readline()
            seen = Path(place) / "stacks"
            limits = ["--rate", str(LOOKS), "--duration", str(SPIED), "--pid", str(loader.pid), "--output", str(seen)]
            begun = time.monotonic()
            subprocess.run(
                [spy, "record", "--gil", "--nonblocking", "--format", "raw", *limits], check=True, capture_output=True
            )
            seconds = time.monotonic() - begun
            loader.terminate()
            images = sum(map(int, loader.stdout.read().split()))
            held = sum(int(line.rpartition(" ")[2]) for line in seen.read_text().splitlines()) / (LOOKS * SPIED)
        rows.append([name, f"{images / seconds:,.0f}", f"{held:.1%}", f"{images / seconds / held:,.0f}"])
    heads = ("augmentation", "images/s of a thread", "lock held", "ceiling of a process, images/s")
    report.show("Python's lock", heads, rows, rows)


def small_images(report: Report, packed: Path) -> None:
    """Compare where small images come from: files, the cache of decoded images, or memory of the device."""
    shards, stored = decoded(packed)
    side = stored.shape[-1]
    rows, measured = [], []
    for augmented, transform in small_transforms(side).items():
        cache = ImageCache([len(shards)], 2 * decoded_bytes(shards)).part(0)
        for number, image in enumerate(stored):
            cache.put(number, image.permute(1, 2, 0).numpy())
        common: dict[str, Any] = {"order": SampleOrder(0, len(shards)), "batch_size": SMALL_BATCH, "workers": THREADS}
        loaders = {
            "decoded": TrainLoader(shards, transform, **common),
            "cached": TrainLoader(shards, transform, cache=cache, **common),
            "held": TrainLoader(shards, transform, stored=stored, **common),
        }
        rounds = [*turns({name: partial(settled_rate, loader) for name, loader in loaders.items()}, ROUNDS)]
        rates = {name: [of_round[name] for of_round in rounds] for name in loaders}
        ratios = [ratio(rates["held"], rates[name]).text(1) for name in list(loaders)[:2]]
        rows.append([augmented, *(Spread.of(one).text(0) for one in rates.values()), *ratios])
        measured.append({"augmentation": augmented, "rates": rates})
    heads = ("augmentation", *loaders, "held over decoded", "over cached")
    report.show(f"images/s of a core, {side} pixels, {THREADS} threads", heads, rows, measured)


def small_images_on_gpu(report: Report, packed: Path) -> None:
    """Measure the images that a GPU augments in a second of the clock, while THREADS threads draw choices."""
    shards, stored = decoded(packed)
    held, side = stored.cuda(), stored.shape[-1]
    rows, measured = [], []
    for augmented, transform in small_transforms(side).items():
        order = SampleOrder(0, len(shards))
        loader = TrainLoader(shards, transform, stored=held, order=order, batch_size=SMALL_BATCH, workers=THREADS)
        rates = [on_gpu(loader) for _ in range(ROUNDS)]
        rows.append([augmented, Spread.of(rates).text(0)])
        measured.append({"augmentation": augmented, "rates": rates})
    report.show(f"images/s of a GPU, {side} pixels", ("augmentation", "images/s"), rows, measured)


def on_gpu(loader: TrainLoader) -> float:
    """Return images per second of the clock, until the GPU has made them, after the first batches."""
    with closing(iter(loader)) as stream:

        def made(batch: Batch) -> None:
            assert isinstance(batch.images, DrawnBatch)
            batch.images.made(lambda tensor: tensor.pin_memory().cuda(non_blocking=True))

        for batch in itertools.islice(stream, SETTLING):
            made(batch)
        torch.cuda.synchronize()
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < SECONDS:
            made(next(stream))
            done += SMALL_BATCH
        torch.cuda.synchronize()
        return done / (time.perf_counter() - begun)


def decoded(packed: Path) -> tuple[ShardSet, Tensor]:
    """Return a packed data set and its images, uint8 [images, 3, side, side]."""
    shards = ShardSet.open(packed, "train")
    stored = SharedPixels([stored_shape(shards)]).images[0]
    decode_into(stored, shards, range(len(shards)), None, THREADS)
    return shards, stored


def small_transforms(side: int) -> dict[str, TrainTransform]:
    """Return the augmentations of small images by name."""
    policy = "rand-m9-n2-mstd0.5-inc1"
    return {
        "crop, flip": TrainTransform(side, padding=4),
        "RandAugment too": TrainTransform(side, padding=4, policy=parse_policy(policy)),
        "RandAugment, always applied": TrainTransform(side, padding=4, policy=parse_policy(f"{policy}-p1")),
    }


def settled_rate(loader: TrainLoader) -> float:
    """Return the rate of a loader after its first batches."""
    with closing(iter(loader)) as stream:
        for _ in itertools.islice(stream, SETTLING):
            pass
        return rate(len(batch.labels) for batch in stream)


def write_small(folder: Path) -> None:
    """Write a data set of 2,000 noise images of 32 pixels, packed."""
    rng = np.random.default_rng(0)
    for number in range(2000):
        path = folder / "images" / "train" / str(number % 10) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    pack(folder / "images" / "train", folder / "packed", val_fraction=0)


def rate(stream: Iterator[int]) -> float:
    """Return images per second of CPU time, over at least SECONDS of it."""
    begun, done = time.process_time(), 0
    while time.process_time() - begun < SECONDS:
        done += next(stream)
    return done / (time.process_time() - begun)


def batches(shards: ShardSet, name: str, workers: int = 0, cache: CachedSet | None = None) -> Iterator[int]:
    """Yield the number of images of each batch of an augmentation, decoded in threads, or in the one that asks."""
    order, (transform, device) = SampleOrder(0, len(shards)), TRANSFORMS[name]
    settings: dict[str, Any] = {"batch_size": BATCH, "workers": workers, "device": device}
    for batch in TrainLoader(shards, transform, order=order, cache=cache, **settings):
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
