"""Sources of tiny images for the tests of the data package."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CLASSES = ("ant", "bee", "cat")


def saved(image: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return an image, or pixels as uint8, as an encoded file. options: those of Pillow."""
    file = io.BytesIO()
    made = image if isinstance(image, Image.Image) else Image.fromarray(image.astype(np.uint8))
    made.save(file, kind, **options)
    return file.getvalue()


def encoded(number: int, kind: str = "PNG", size: tuple[int, int] = (12, 10)) -> bytes:
    """Return image `number`, made of random pixels, as an encoded file.

    size: (width, height)
    """
    return saved(np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8), kind)


def write_classes(folder: Path, per_class: int, first: int = 0) -> dict[bytes, int]:
    """Write `folder`/<class>/<n>.JPEG or .png, and return each image's label by its bytes."""
    labels = {}
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            data = encoded(first, "JPEG" if i % 2 else "PNG")
            (folder / name / f"{i}{'.JPEG' if i % 2 else '.png'}").write_bytes(data)
            labels[data] = label
            first += 1
    return labels


def write_tree(folder: Path, train: int = 7, val: int = 3) -> dict[bytes, int]:
    """Write train/ and val/ with class folders, and return each image's label by its bytes."""
    return write_classes(folder / "train", train) | write_classes(folder / "val", val, first=1000)


def write_zips(folder: Path, train: int = 6, val: int = 3, *, classes: bool = True, first: int = 0) -> dict[bytes, int]:
    """Write train.zip, val.zip and their label maps, and return each image's label by its bytes."""
    folder.mkdir(parents=True)
    labels = {}
    for split, count, begin in (("train", train, first), ("val", val, first + 1000)):
        lines = []
        with zipfile.ZipFile(folder / f"{split}.zip", "w") as archive:
            for i in range(count):
                data = encoded(begin + i)
                archive.writestr(f"{CLASSES[i % 3]}/{i}.png", data)
                lines.append(f"{CLASSES[i % 3]}/{i}.png\t{i % 3}\n")
                labels[data] = i % 3
        (folder / f"{split}_map.txt").write_text("".join(lines))
    if classes:
        (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return labels
