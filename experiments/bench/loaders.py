"""The loaders that `bench_data.py` compares. Each yields batches [batch, 3, 224, 224], uint8 or float.

All decode on one core, except `threads` and `processes`, which use all cores.
"""

import io
import itertools
import math
import random
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from vitpar.data import SampleOrder, ShardSet, TrainLoader, TrainTransform
from vitpar.launch.resources import cpu_cores

SIZE, BATCH = 224, 64


def vitpar(folder: Path) -> Generator[Tensor]:
    """Load with vitpar and one decoding thread."""
    yield from _ours(folder, workers=1)


def _ours(folder: Path, workers: int, start: int = 0) -> Generator[Tensor]:
    shards = ShardSet.open(folder, "train")
    order = SampleOrder(0, len(shards))
    loader = TrainLoader(shards, TrainTransform(SIZE), order=order, batch_size=BATCH, workers=workers, start=start)
    for batch in loader:
        assert batch.images is not None
        yield batch.images


def threads(folder: Path) -> Generator[Tensor]:
    """Load with vitpar and one decoding thread per core."""
    yield from _ours(folder, workers=cpu_cores())


def processes(folder: Path) -> Iterator[Tensor]:
    """Load with vitpar in the worker processes of torch's DataLoader, one per core; each decodes different batches."""
    yield from DataLoader(_InProcesses(folder), batch_size=None, num_workers=cpu_cores())


class _InProcesses(IterableDataset):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        assert info is not None
        torch.set_num_threads(1)
        return _ours(self._folder, workers=0, start=info.id * 10**6)


def plain_webdataset(folder: Path) -> Generator[Tensor]:
    """Load with webdataset as it documents: shuffled shards and buffer, Pillow, one worker of torch's DataLoader."""
    urls = [str(path) for path in sorted(folder.glob("train-*.tar"))]
    pipeline = (
        webdataset.WebDataset(urls, shardshuffle=100, repeat=True, resampled=False, empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(random_resized_crop, int)
        .batched(BATCH)
    )
    loader = DataLoader(pipeline, batch_size=None, num_workers=1)
    for images, _ in itertools.chain.from_iterable(itertools.repeat(loader)):
        yield images


class ImageFolder(Dataset):
    """Data set of image files that are read and decoded with Pillow, as in torchvision's ImageFolder."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> Tensor:
        with self.paths[i].open("rb") as file:
            return random_resized_crop(Image.open(file).convert("RGB"))


def image_folder(folder: Path) -> Generator[Tensor]:
    """Load an image folder with Pillow and one worker of torch's DataLoader."""
    loader = DataLoader(ImageFolder(folder), BATCH, shuffle=True, num_workers=1, drop_last=True)
    yield from itertools.chain.from_iterable(itertools.repeat(loader))


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


def photographs(count: int) -> Iterator[bytes]:
    """Yield `count` synthetic JPEG files of ImageNet's typical size (500x375 pixels, 110 kB): noise at all scales."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        pixels = np.zeros((375, 500, 3), np.float32)
        for scale in (1, 2, 4, 8, 16, 32, 64, 128):
            part = rng.normal(0, 10 * scale**0.45, (375 // scale + 2, 500 // scale + 2, 3)).astype(np.float32)
            layer = torch.nn.functional.interpolate(
                torch.from_numpy(part).permute(2, 0, 1)[None], (375, 500), mode="bilinear"
            )
            pixels += layer[0].permute(1, 2, 0).numpy()
        file = io.BytesIO()
        Image.fromarray((pixels + 128).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        yield file.getvalue()
