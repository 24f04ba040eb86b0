"""Made-up photographs: JPEG files of the size, and about the bytes, that those of ImageNet have."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375
CLASSES = 10


def photograph(rng: np.random.Generator) -> bytes:
    """Shapes of all sizes, noise more the finer it is, as in nature; about 100 kB."""
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
    """``folder/<split>/<class>/<number>.jpg``, `count` to train on, a few to validate with. Returns their mean size in
    bytes."""
    rng = np.random.default_rng(0)
    files = [photograph(rng) for _ in range(min(count, 64))]  # noise is slow to make; each is used again

    def places() -> Iterator[Path]:
        for number in range(count):
            yield folder / "train" / f"{number % CLASSES}" / f"{number}.jpg"
        for number in range(CLASSES):
            yield folder / "val" / f"{number}" / "0.jpg"

    for number, place in enumerate(places()):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(files[number % len(files)])
    return sum(map(len, files)) // len(files)
