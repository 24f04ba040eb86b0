"""Survey of a packed data set: counts and sizes, ready for JSON, and samples as evaluation and training make them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from vitpar.data.images import BadImage, decode, image_size
from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

    from vitpar.data.transforms.batch import Mix
    from vitpar.data.transforms.sample import EvalTransform, TrainTransform

HEADERS = 200
"""Most images of a split whose sizes are read."""
TEXTS = 3
"""Sequences of a split that are decoded."""
ROWS, EPOCHS = 6, 7  # rows and augmented columns
_GAP, _LINE, _LEAST = 4, 12, 64  # gap, height of a line of text and least size of a shown image, in pixels
_FIVE = (0, 0.25, 0.5, 0.75, 1)  # quantiles that stand for a distribution
T = TypeVar("T")


def survey(folder: str | Path) -> dict[str, Any]:
    """Survey the data set in `folder`: its fields in the manifest, and for each split the counts of its shards.

    Of images also the samples of each class, and the widths, heights and bytes of at most HEADERS images that are
    spread evenly over a split; of text the documents, tokens and first sequences. Distributions are [minimum, three
    quartiles, maximum].

    Raises DataError as `ShardSet.open` does, and for a damaged sample.
    """
    manifest = read_manifest(folder)
    if (text := manifest.text) is None:
        about: dict[str, Any] = {"classes": manifest.classes, "class_names": manifest.class_names}
    else:
        about = text.model_dump(mode="json", include={"tokens", "vocab_size", "specials", "cross_documents"})
        about |= {"tokenizer": text.tokenizer_file or "bytes"}
    splits = dict[str, dict[str, Any]]()
    for name in manifest.splits:
        shards = (ShardSet if text is None else TextSet).open(folder, name)
        splits[name] = {"samples": len(shards), "shards": len(shards.files), "bytes": shards.bytes}
        splits[name] |= {"fingerprint": shards.fingerprint}
        splits[name] |= _text(shards) if isinstance(shards, TextSet) else _images(shards)
    return {"folder": str(folder), **about, "splits": splits}


def _images(shards: ShardSet) -> dict[str, Any]:
    sizes = [made_of(shards, i, lambda i: (*image_size(data := shards.read(i)), len(data))) for i in spread(shards)]
    width, height, image_bytes = np.quantile(sizes, _FIVE, axis=0, method="nearest").T.tolist()
    return {"per_class": list(shards.per_class), "width": width, "height": height, "image_bytes": image_bytes}


def _text(text: TextSet) -> dict[str, Any]:
    return {
        "documents": text.documents,
        "ids": int(text.lengths.sum()),
        "length": np.quantile(text.lengths, _FIVE, method="nearest").tolist(),
        "mean_length": float(text.lengths.mean()),
        "decoded": [made_of(text, i, text.decode) for i in range(min(TEXTS, len(text)))],
    }


def spread(shards: ShardSet, most: int = HEADERS) -> list[int]:
    """Return at most `most` samples that are spread evenly over a split."""
    return np.unique(np.linspace(0, len(shards) - 1, most).astype(int)).tolist()


def some_sizes(shards: ShardSet, most: int = HEADERS) -> Iterator[tuple[int, int, int]]:
    """Yield number, height and width of at most `most` images, by their headers. Damaged ones are left out.

    Raises DataError for a shard that is missing, too short or was replaced.
    """
    for i in spread(shards, most):
        with suppress(BadImage):
            width, height = image_size(shards.read(i))
            yield i, height, width


def shorter_side(shards: ShardSet) -> int | None:
    """Return the median of the shorter sides of some images, in pixels; None if none can be read."""
    sides = [min(shape) for _, *shape in some_sizes(shards)]
    return int(np.median(sides)) if sides else None


def made_of(shards: ShardSet, i: int, make: Callable[[int], T]) -> T:
    """Return what `make` makes of the number of a sample.

    Raises DataError, which names the sample, for a damaged one.
    """
    try:
        return make(i)
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
    import torch  # slow, and other surveys do without
    from PIL import Image, ImageDraw

    samples = order.samples(0, np.arange(min(ROWS, order.size)))
    pixels = [made_of(shards, int(sample), lambda i: decode(shards.read(i))) for sample in samples]
    columns = [torch.stack([evaluated(image) for image in pixels])]
    zeros = np.zeros_like(samples)
    for epoch in range(EPOCHS):
        keys = sample_keys(order.seed, zeros + epoch, samples, zeros)
        images = train(pixels, keys)
        if mix:
            mixed = replace(mix, apart=1)(keys, train.size)
            images = mixed.images(images.float(), range(len(keys)), len(keys)).round().byte()
        columns.append(images)
    shown = max(_LEAST, train.size) // train.size * train.size  # tiny images are enlarged by a whole factor
    width, height = len(columns) * (shown + _GAP) + _GAP, len(samples) * (shown + _GAP + _LINE) + _GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for row, label in enumerate(shards.labels[samples]):
        top = _GAP + row * (shown + _GAP + _LINE)
        draw.text((_GAP, top), shards.classes[label], fill="black")
        for column, made in enumerate(columns):
            image = Image.fromarray(made[row].permute(1, 2, 0).numpy())
            place = _GAP + column * (shown + _GAP), top + _LINE
            sheet.paste(image.resize((shown, shown), Image.Resampling.NEAREST), place)
    return sheet
