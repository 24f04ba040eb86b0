"""A picture of what training sees: some samples, as they are evaluated and as several epochs augment them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from vitpar.data.images import BadImage, decode
from vitpar.data.order import Order
from vitpar.data.randomness import Draws, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.transforms import EvalTransform, Mix, TrainTransform
from vitpar.errors import DataError

ROWS, EPOCHS = 6, 7
_GAP, _LINE, _LEAST = 4, 12, 64  # pixels


def contact_sheet(
    shards: ShardSet, evaluated: EvalTransform, train: TrainTransform, mix: Mix, order: Order
) -> Image.Image:
    """The first samples of the run, a row each, with the name of the class: how it is evaluated, then what epoch after
    epoch makes of it. Mixed images are mixed with the next row. Raises DataError for a damaged image."""
    samples = order.samples(0, np.arange(min(ROWS, order.size)))
    pixels = [_pixels(shards, int(sample)) for sample in samples]
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


def _pixels(shards: ShardSet, i: int) -> NDArray[np.uint8]:
    try:
        return decode(shards.read(i))
    except BadImage as error:
        raise DataError(shards.complaint(i, error)) from None


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
