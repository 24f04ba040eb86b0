"""What a packed data set holds, for people and programs to read."""

from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.images import BadImage, image_size
from vitpar.data.shards.manifest import read_manifest
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import DataError

HEADERS = 200  # images of a split whose size is looked at


def survey(folder: str | Path) -> dict[str, Any]:
    """Counts and sizes of the data set in `folder`, ready for JSON.

    {"folder", "classes": [names], "class_names": [names] or None, "splits": {name: {"samples", "shards", "bytes",
    "per_class": [counts], "fingerprint", "width": [5 numbers], "height": [5], "image_bytes": [5]}}}; the smallest, the
    quartiles and the largest, in pixels and bytes, of at most HEADERS images spread evenly over the split. Raises
    DataError as `ShardSet.open` does, and for a damaged image header.
    """
    manifest = read_manifest(folder)
    splits = {}
    for name in manifest.splits:
        shards = ShardSet.open(folder, name)
        looked_at = np.unique(np.linspace(0, len(shards) - 1, HEADERS).astype(int))
        sizes = np.array([_size(shards, int(i)) for i in looked_at])
        spread = np.quantile(sizes, (0, 0.25, 0.5, 0.75, 1), axis=0, method="nearest").T.tolist()
        splits[name] = {
            "samples": len(shards),
            "shards": len(shards.files),
            "bytes": shards.bytes,
            "per_class": list(shards.per_class),
            "fingerprint": shards.fingerprint,
            **dict(zip(("width", "height", "image_bytes"), spread, strict=True)),
        }
    return {
        "folder": str(folder),
        "classes": manifest.classes,
        "class_names": manifest.class_names,
        "splits": splits,
    }


def _size(shards: ShardSet, i: int) -> tuple[int, int, int]:
    try:
        data = shards.read(i)
        return *image_size(data), len(data)
    except BadImage as error:
        raise DataError(shards.complaint(i, error)) from None
