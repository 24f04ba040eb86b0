"""Small images of a source in the memory of a device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitpar.data.images import decode
from vitpar.data.sources import open_source


@dataclass(frozen=True)
class Split:
    """Images of one split, uint8 [count, channels, height, width], and their labels [count], on one device."""

    images: Tensor
    labels: Tensor


def load(location: Path, device: torch.device, most: int | None = None) -> dict[str, Split]:
    """Decode a source of equally large images, of any kind that ``vitpar data pack`` reads; return its splits.

    most: images of a split, evenly spaced; None for all.
    """
    found = {}
    for name, split in open_source(location).splits.items():
        chosen = np.arange(0, len(split.labels), 1 if most is None else max(1, len(split.labels) // most))
        with ThreadPoolExecutor() as pool:
            pixels = np.stack(list(pool.map(lambda i, read=split.read: decode(read(int(i))), chosen)))
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device)
        found[name] = Split(images, torch.from_numpy(split.labels[chosen].astype(np.int64)).to(device))
    return found
