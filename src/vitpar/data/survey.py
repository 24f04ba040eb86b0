"""Survey of a packed data set: counts and sizes, and a contact sheet of augmented samples."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitpar.data.images import BadImage, decode, image_size
from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.sides import spread
from vitpar.data.transforms.batch import Mix
from vitpar.data.transforms.sample import EvalTransform, TrainTransform
from vitpar.errors import DataError

ROWS, EPOCHS = 6, 7  # rows and augmented columns of the contact sheet
_GAP, _LINE, _LEAST = 4, 12, 64  # gap, height of a line of text and least size of a shown image, in pixels
T = TypeVar("T")


class SplitSurvey(TypedDict):
    """Counts and sizes of a split.

    `width`, `height` and `image_bytes` are [minimum, three quartiles, maximum] of at most HEADERS images that are
    spread evenly over the split.
    """

    samples: int
    """Number of images."""
    shards: int
    """Number of shards."""
    bytes: int
    """Bytes of all shards."""
    per_class: list[int]
    """Images of each class, in label order."""
    fingerprint: str
    """Checksum of the samples and their order."""
    width: list[int]
    """Widths in pixels."""
    height: list[int]
    """Heights in pixels."""
    image_bytes: list[int]
    """Sizes of encoded images in bytes."""


class Survey(TypedDict):
    """Counts and sizes of a data set, ready for JSON."""

    folder: str
    """Folder of the data set, as given."""
    classes: list[str]
    """Identifiers of the classes, in label order."""
    class_names: list[str] | None
    """Human-readable names of the classes, in the same order; None if they do not differ."""
    splits: dict[str, SplitSurvey]
    """Survey of each split, by name."""


def survey(folder: str | Path) -> Survey:
    """Survey the data set in `folder`.

    Raises DataError as `ShardSet.open` does, and for a damaged image header.
    """
    manifest = read_manifest(folder)
    splits: dict[str, SplitSurvey] = {}
    for name in manifest.splits:
        shards = ShardSet.open(folder, name)
        sizes = np.array([_made_of(shards, i, lambda data: (*image_size(data), len(data))) for i in spread(shards)])
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
    """Return `make` applied to the encoded image of sample `i`.

    Raises DataError for a damaged one.
    """
    try:
        return make(shards.read(i))
    except BadImage as error:
        raise DataError(shards.complaint(i, error)) from None


def contact_sheet(
    shards: ShardSet, evaluated: EvalTransform, train: TrainTransform, mix: Mix, order: SampleOrder
) -> Image.Image:
    """Draw the first ROWS samples of a run, one row each, with the names of their classes.

    A row shows the image as evaluation transforms it, then as the first EPOCHS epochs augment it. Mixup and CutMix pair
    neighbouring rows.

    Raises DataError for a damaged image.
    """
    samples = order.samples(0, np.arange(min(ROWS, order.size)))
    pixels = [_made_of(shards, int(sample), decode) for sample in samples]
    columns = [torch.stack([evaluated(image) for image in pixels])]
    zeros = np.zeros_like(samples)
    for epoch in range(EPOCHS):
        keys = sample_keys(order.seed, zeros + epoch, samples, zeros)
        images = train(pixels, keys)
        if mix:
            mixed = Mix(mix.mixup, mix.cutmix, mix.probability, mix.switch)(keys, train.size)
            images = mixed.images(images.float(), range(len(keys)), len(keys)).round().byte()
        columns.append(images)
    names = [shards.classes[shards.label(int(sample))] for sample in samples]
    return _sheet(torch.stack(columns, 1), names, train.size)


def _sheet(images: Tensor, names: Sequence[str], size: int) -> Image.Image:
    """Draw the images of a contact sheet.

    images: uint8 [rows, columns, 3, size, size].
    names: class name of each row.
    size: height and width of an image in pixels.
    """
    shown = max(_LEAST, size) // size * size  # tiny images are enlarged by a whole factor
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
