"""Synthetic photographs: JPEG files with the dimensions and roughly the file size of ImageNet's."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
CLASSES = 10


def photograph(rng: np.random.Generator) -> bytes:
    """Return a JPEG file of about 100 kB: noise at all scales, whose spectrum resembles that of photographs."""
    image = np.full((HEIGHT, WIDTH, 3), 128.0)
    for size in (4, 8, 16, 32, 64, 128, 250):
        small = rng.normal(0, 1, (size, size, 3)).clip(-3, 3) * 42 + 128
        grown = Image.fromarray(small.clip(0, 255).astype(np.uint8)).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
        image += (np.asarray(grown, np.float64) - 128) * (8 / size) ** 0.35
    image += rng.normal(0, 12, image.shape)
    file = BytesIO()
    Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_photographs(folder: Path, count: int) -> int:
    """Write ``folder/<split>/<class>/<number>.jpg``: `count` training images and one validation image per class.

    Returns their mean size in bytes.
    """
    rng = np.random.default_rng(0)
    files = [photograph(rng) for _ in range(min(count, 64))]  # slow to generate, so the files repeat

    def places() -> Iterator[Path]:
        for number in range(count):
            yield folder / "train" / f"{number % CLASSES}" / f"{number}.jpg"
        for number in range(CLASSES):
            yield folder / "val" / f"{number}" / "0.jpg"

    for number, place in enumerate(places()):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(files[number % len(files)])
    return sum(map(len, files)) // len(files)
