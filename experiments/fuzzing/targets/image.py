"""Target: encoded images of any type."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from fuzzing import oracle
from fuzzing.attacks import images
from fuzzing.seeds import encoded, picture
from fuzzing.target import Case, Files, FileTarget
from vitpar.data.images import decode, image_size, image_type


def forms() -> list[bytes]:
    """Return images of all supported types, in most of their variants."""
    rgb, grey = picture(1, 16), picture(2, 16, "L")
    found = [
        encoded(rgb, "JPEG"),
        encoded(picture(8, 40), "JPEG", progressive=True),
        encoded(grey, "JPEG", quality=30),
        encoded(picture(3, 16, "CMYK"), "JPEG"),
        encoded(rgb, "PNG"),
        encoded(picture(4, 16, "RGBA"), "PNG"),
        encoded(picture(5, 16, "P"), "PNG"),
        encoded(grey.convert("1"), "PNG"),
        encoded(grey.convert("I;16"), "PNG"),
        encoded(picture(6, 16, "P"), "GIF"),
        encoded(picture(6, 16, "P"), "GIF", save_all=True, append_images=[picture(7, 16, "P")]),
        encoded(rgb, "BMP"),
        encoded(grey, "BMP"),
        encoded(rgb, "WEBP"),
        encoded(rgb, "WEBP", lossless=True),
        encoded(rgb, "WEBP", save_all=True, append_images=[picture(8, 16)]),
    ]
    return found + [
        encoded(image, "TIFF", compression=compression)
        for image, compression in (
            (rgb, None),
            (rgb, "tiff_lzw"),
            (grey, "tiff_adobe_deflate"),
            (rgb, "packbits"),
            (rgb, "jpeg"),
            (grey.convert("1"), "group4"),
            (grey.convert("I;16"), None),
        )
    ]


class Images(FileTarget):
    """One encoded image."""

    what = "encoded images of six types, headers that lie, bombs, and other formats in disguise"
    strays = False

    def __init__(self, home: Path) -> None:
        self.seeds = [{"image": data} for data in forms()]
        self.attacks = (_headers, _headers, _headers, _disguised)

    def read(self, case: Case) -> None:
        data = (case.place / "image").read_bytes()
        image_type(data)
        pixels = decode(data)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.flags.writeable:
            raise oracle.Wrong(f"decoded to {pixels.dtype} of shape {pixels.shape}")
        width, height = image_size(data)
        # A large JPEG may be decoded at 1/2, 1/4 or 1/8 of its size.
        sides = {(-(-height // part), -(-width // part)) for part in (1, 2, 4, 8)}
        if pixels.shape[:2] not in sides | {side[::-1] for side in sides}:
            raise oracle.Wrong(f"its header says {width} x {height}, and it decodes to {pixels.shape}")


def _headers(draw: random.Random, files: Files) -> str:
    files["image"], words = images.attack(draw, _bytes(files))
    return words


def _disguised(draw: random.Random, files: Files) -> str:
    files["image"], words = images.disguised(draw, _bytes(files))
    return words


def _bytes(files: Files) -> bytes:
    content = files["image"]
    assert isinstance(content, bytes)
    return content
