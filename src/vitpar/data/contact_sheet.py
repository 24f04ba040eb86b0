"""A contact sheet of a packed data set: samples as evaluation and training transform them."""

from dataclasses import replace

import numpy as np
import torch
from PIL import Image, ImageDraw

from vitpar.data.images import decode
from vitpar.data.randomness import SampleOrder, sample_keys
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.survey import made_of
from vitpar.data.transforms.batch import Mix
from vitpar.data.transforms.sample import EvalTransform, TrainTransform

ROWS, EPOCHS = 6, 7  # rows and augmented columns
_GAP, _LINE, _LEAST = 4, 12, 64  # gap, height of a line of text and least size of a shown image, in pixels


def contact_sheet(
    shards: ShardSet, evaluated: EvalTransform, train: TrainTransform, mix: Mix, order: SampleOrder
) -> Image.Image:
    """Draw the first ROWS samples of a run, one row each, with the names of their classes.

    A row shows the image as evaluation transforms it, then as the first EPOCHS epochs augment it. Mixup and CutMix pair
    neighbouring rows.

    Raises DataError for a damaged image.
    """
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
