"""Sizes of the images of a split, from a few of them."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from vitpar.data.images import BadImage, image_size
from vitpar.data.shards.shard_set import ShardSet

HEADERS = 200
"""Most images of a split whose sizes are read."""


def shorter_side(shards: ShardSet) -> int | None:
    """Return the median of the shorter sides of a split's images, in pixels; None if none can be read.

    It looks at those images that ``vitpar.data.survey`` looks at.
    """
    sides = []
    for i in spread(shards):
        with suppress(BadImage):  # training decides what a damaged one means
            sides.append(min(image_size(shards.read(i))))
    return int(np.median(sides)) if sides else None


def spread(shards: ShardSet) -> list[int]:
    """Return at most HEADERS samples that are spread evenly over a split."""
    return np.unique(np.linspace(0, len(shards) - 1, HEADERS).astype(int)).tolist()
