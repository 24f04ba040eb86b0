"""Masks of patches in blocks (BEiT, arXiv 2106.08254), as DINOv2 and DINOv3 draw them, by the keys of the samples.

Which crops of a global batch are masked, and how many of their patches, depends on the keys of the complete batch, so
that it is the same under every plan. Which patches they are depends on the key of the image.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from vitpar.data.randomness import hash_numbers
from vitpar.models.dino.config import GLOBAL

_WHICH, _WHERE = 0x3A5C, 0x3A5D  # separate these random numbers from each other, and from others of the keys
_LEAST, _TRIES = 4, 10  # patches of a block, and blocks that are tried before the rest is filled at random
_LOG_RATIO = math.log(1 / 0.3)  # of a block's height over width, at most


def block_masks(
    keys: NDArray[np.int64],
    rows: Collection[int],
    side: int,
    probability: float = 0.5,
    ratios: tuple[float, float] = (0.1, 0.5),
) -> NDArray[np.bool_]:
    """Return whether patches of the global crops of a batch are masked, [batch, 2, side²].

    keys: int64 [batch], of the complete batch.
    rows: samples that are needed. Others have no masks.
    side: patches along a side of a crop.
    probability: share of the crops that are masked.
    ratios: least and largest share of a crop's patches that are masked. Shares of masked crops are evenly spread.
    """
    places = GLOBAL * len(keys)
    numbers = np.tile(np.arange(GLOBAL), len(keys))
    order = np.argsort(hash_numbers(_WHICH, np.repeat(keys, GLOBAL), numbers), kind="stable")
    rank = np.argsort(order)
    masked = int(places * probability)
    shares = np.linspace(*ratios, masked + 1)[1:]
    masks = np.zeros((len(keys), GLOBAL, side * side), bool)
    for row in rows:
        for crop in range(GLOBAL):
            if (place := rank[row * GLOBAL + crop]) < masked:
                seed = int(hash_numbers(_WHERE, int(keys[row]), crop)[0])
                masks[row, crop] = _masked(random.Random(seed), side, int(side * side * shares[place])).ravel()
    return masks


def _masked(draws: random.Random, side: int, count: int) -> NDArray[np.bool_]:
    """Return a mask [side, side] of exactly `count` patches: blocks first, then single ones at random."""
    mask = np.zeros((side, side), bool)
    left = count
    for _ in range(_TRIES * count):
        if left < _LEAST:
            break
        for _ in range(_TRIES):
            area, ratio = draws.uniform(_LEAST, left), math.exp(draws.uniform(-_LOG_RATIO, _LOG_RATIO))
            height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if not (0 < height < side and 0 < width < side):
                continue
            top, start = draws.randint(0, side - height), draws.randint(0, side - width)
            block = mask[top : top + height, start : start + width]
            if 0 < (new := block.size - int(block.sum())) <= left:
                block[:] = True
                left -= new
                break
        else:
            break
    free = np.flatnonzero(~mask)
    mask.flat[draws.sample(free.tolist(), left)] = True
    return mask
