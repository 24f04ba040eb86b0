"""Survey of a packed data set: counts and sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import TypedDict, TypeVar

import numpy as np

from vitpar.data.images import BadImage, image_size
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.data.shards.sides import spread
from vitpar.errors import DataError

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
        sizes = np.array([made_of(shards, i, lambda data: (*image_size(data), len(data))) for i in spread(shards)])
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


def made_of(shards: ShardSet, i: int, make: Callable[[bytes], T]) -> T:
    """Return `make` applied to the encoded image of sample `i`.

    Raises DataError for a damaged one.
    """
    try:
        return make(shards.read(i))
    except BadImage as error:
        raise DataError(shards.complaint(i, error)) from None
