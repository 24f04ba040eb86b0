"""Survey of a packed data set: counts and sizes, and a picture of the samples as training augments them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitpar.data.images import BadImage, decode, image_size
from vitpar.data.randomness import Draws, SampleOrder, sample_keys
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms.batch import Mix
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError

HEADERS = 200  # images of a split whose size is looked at
ROWS, EPOCHS = 6, 7  # of the contact sheet
_GAP, _LINE, _LEAST = 4, 12, 64  # pixels
T = TypeVar("T")


class SplitSurvey(TypedDict):
    """Counts and sizes of a split. width, height, image_bytes: the smallest, the quartiles and the largest, in pixels
    and bytes, of at most HEADERS images spread evenly over the split."""

    samples: int
    shards: int
    bytes: int
    per_class: list[int]
    fingerprint: str
    width: list[int]
    height: list[int]
    image_bytes: list[int]


class Survey(TypedDict):
    """Counts and sizes of a data set, ready for JSON."""

    folder: str
    classes: list[str]
    class_names: list[str] | None
    splits: dict[str, SplitSurvey]


def survey(folder: str | Path) -> Survey:
    """Look at the data set in `folder`. Raises DataError as `ShardSet.open` does, and for a damaged image header."""
    manifest = read_manifest(folder)
    splits: dict[str, SplitSurvey] = {}
    for name in manifest.splits:
        shards = ShardSet.open(folder, name)
        looked_at = np.unique(np.linspace(0, len(shards) - 1, HEADERS).astype(int))
        sizes = np.array([_made_of(shards, int(i), lambda data: (*image_size(data), len(data))) for i in looked_at])
        width, height, image_bytes = np.quantile(sizes, (0, 0.25, 0.5, 0.75, 1), axis=0, method="nearest").T.tolist()
        splits[name] = {
            "samples": len(shards),
            "shards": len(shards.files),
            "bytes": shards.bytes,
            "per_class": list(shards.per_class),
            "fingerprint": shards.fingerprint,
            "width": width,
            "height": height,
            "image_bytes": image_bytes,
        }
    return {
        "folder": str(folder),
        "classes": manifest.classes,
        "class_names": manifest.class_names,
        "splits": splits,
    }


def _made_of(shards: ShardSet, i: int, make: Callable[[bytes], T]) -> T:
    """Return what `make` makes of the encoded image of sample `i`. Raises DataError for a damaged one."""
    try:
        return make(shards.read(i))
    except BadImage as error:
        raise DataError(shards.complaint(i, error)) from None


def contact_sheet(
    shards: ShardSet, evaluated: EvalTransform, train: TrainTransform, mix: Mix, order: SampleOrder
) -> Image.Image:
    """Draw the first samples of the run, a row each, with the name of the class: as evaluation sees it, then as several
    epochs augment it. Mixed images are mixed with the next row. Raises DataError for a damaged image."""
    samples = order.samples(0, np.arange(min(ROWS, order.size)))
    pixels = [_made_of(shards, int(sample), decode) for sample in samples]
    columns = [torch.stack([evaluated(image) for image in pixels])]
    zeros = np.zeros_like(samples)
    for epoch in range(EPOCHS):
        keys = sample_keys(order.seed, zeros + epoch, samples, zeros)
        images = torch.stack([train(image, Draws(int(key))) for image, key in zip(pixels, keys, strict=True)])
        if mix:
            mixed = Mix(mix.mixup, mix.cutmix, mix.probability, mix.switch)(keys, train.size)
            images = mixed.images(images.float(), range(len(keys)), len(keys)).round().byte()
        columns.append(images)
    names = [shards.classes[shards.label(int(sample))] for sample in samples]
    return _sheet(torch.stack(columns, 1), names, train.size)


def _sheet(images: Tensor, names: Sequence[str], size: int) -> Image.Image:
    """images: uint8 [rows, columns, 3, size, size]."""
    shown = max(_LEAST, size) // size * size  # tiny images are shown larger, pixel by pixel
    rows, columns = images.shape[:2]
    sheet = Image.new("RGB", (columns * (shown + _GAP) + _GAP, rows * (shown + _GAP + _LINE) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for row in range(rows):
        top = _GAP + row * (shown + _GAP + _LINE)
        draw.text((_GAP, top), names[row], fill="black")
        for column in range(columns):
            image = Image.fromarray(images[row, column].permute(1, 2, 0).numpy())
            place = _GAP + column * (shown + _GAP), top + _LINE
            sheet.paste(image.resize((shown, shown), Image.Resampling.NEAREST), place)
    return sheet
