"""A validation split out of a training split."""

import math

import numpy as np

from vitpar.data.order import shuffled
from vitpar.data.sources.source import Source
from vitpar.errors import DataError


def carve_val(source: Source, fraction: float, seed: int) -> Source:
    """Move ⌈fraction × samples⌉ of `train` into `val`, as nearly the same part of every class as can be."""
    train = source.splits["train"]
    counts = np.bincount(train.labels, minlength=len(source.classes))
    total = math.ceil(fraction * len(train.labels) - 1e-9)
    exact = counts * fraction
    taken = np.floor(exact).astype(int)
    for label in np.argsort(taken - exact, kind="stable"):  # the largest remainder first
        if taken.sum() < total and taken[label] < counts[label] - 1:  # every class keeps an image to train on
            taken[label] += 1
    if not taken.any():
        raise DataError(
            f"{len(train.labels)} images in {len(source.classes)} classes are too few to carve a val split out of, "
            "since every class keeps one to train on: add images or a val/ folder"
        )
    order = shuffled(np.arange(len(train.labels)), len(train.labels), seed)
    is_val = np.zeros(len(train.labels), dtype=bool)
    by_class = order[np.argsort(train.labels[order], kind="stable")]
    begins = np.cumsum(counts) - counts
    for begin, number in zip(begins, taken, strict=True):
        is_val[by_class[begin : begin + number]] = True
    splits = {"train": train.subset(np.flatnonzero(~is_val)), "val": train.subset(np.flatnonzero(is_val))}
    return Source(source.classes, splits)
