"""Small images and tar files for seeds, with the same bytes every time."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL import Image

Members = list[tuple[str, bytes]]
"""Names and contents of the files in an archive."""


def picture(number: int, side: int = 8, mode: str = "RGB") -> Image.Image:
    """Return a small image of noise.

    number: seed.
    """
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """Return the image as an encoded file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(number: int, side: int = 8) -> bytes:
    """Return a small PNG of noise."""
    return encoded(picture(number, side), "PNG")


def jpeg(number: int, side: int = 8) -> bytes:
    """Return a small JPEG of noise."""
    return encoded(picture(number, side), "JPEG")


def samples(count: int, labels: str = "cls") -> Members:
    """Return `count` images with their labels.

    labels: `cls` or `json` for a label file per image, `folder` for a folder per class.
    """
    found: Members = []
    for i in range(count):
        image = jpeg(i) if i % 2 else png(i)
        extension = "jpg" if i % 2 else "png"
        if labels == "folder":
            found.append((f"class{i % 3}/{i:04d}.{extension}", image))
            continue
        label = b"%d" % (i % 3) if labels == "cls" else b'{"label": %d, "text": "an image"}' % (i % 3)
        found += [(f"{i:04d}.{labels}", label), (f"{i:04d}.{extension}", image)]
    return found


def tar(members: Iterable[tuple[str, bytes]], format: int = tarfile.USTAR_FORMAT) -> bytes:
    """Return a tar file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()
