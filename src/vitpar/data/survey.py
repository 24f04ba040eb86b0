"""What a packed data set holds, for people and programs to read."""

from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.images import BadImage, image_size
from vitpar.data.index import ShardSet, read_manifest
from vitpar.errors import DataError

HEADERS = 200  # images of a split whose size is looked at


def survey(folder: str | Path) -> dict[str, Any]:
    """Counts and sizes of the data set in `folder`, ready for JSON.

    {"folder", "classes": [names], "splits": {name: {"samples", "shards", "bytes", "per_class": [counts],
    "width": [smallest, largest], "height": [smallest, largest]}}}; widths and heights in pixels, of at most HEADERS
    images spread evenly over the split. Raises DataError as `ShardSet.open` does, and for a damaged image header.
    """
    manifest = read_manifest(folder)
    splits = {}
    for name in manifest.splits:
        shards = ShardSet.open(folder, name)
        looked_at = np.unique(np.linspace(0, len(shards) - 1, HEADERS).astype(int))
        sizes = np.array([_size(shards, int(i)) for i in looked_at])
        splits[name] = {
            "samples": len(shards),
            "shards": len(shards.files),
            "bytes": shards.bytes,
            "per_class": list(shards.per_class),
            "width": [int(sizes[:, 0].min()), int(sizes[:, 0].max())],
            "height": [int(sizes[:, 1].min()), int(sizes[:, 1].max())],
        }
    return {"folder": str(folder), "classes": manifest.classes, "splits": splits}


def _size(shards: ShardSet, i: int) -> tuple[int, int]:
    try:
        return image_size(shards.read(i))
    except BadImage as error:
        raise DataError(f"sample '{shards.name(i)}' of '{shards.folder}' is damaged: {error}") from None
