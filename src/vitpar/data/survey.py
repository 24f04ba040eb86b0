"""Survey of a packed data set: counts and sizes, ready for JSON."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vitpar.data.images import BadImage, image_size
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.text.text_set import TextSet
from vitpar.errors import DataError

HEADERS = 200
"""Most images of a split whose sizes are read."""
TEXTS = 3
"""Sequences of a split that are decoded."""
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
