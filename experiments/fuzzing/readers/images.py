"""Target: encoded images."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from fuzzing import oracle
from fuzzing.case import Case, Target
from fuzzing.hostile import PIECES, png_chunk, zeros
from helpers.tiny_images import encoded
from vitpar.data.images import decode, image_size, image_type


class Image(Target):
    """Encoded images of six types, headers that lie, bombs, and other formats in disguise."""

    def make(self, home: Path) -> None:
        rgb = PIL.Image.open(io.BytesIO(encoded(1, size=(16, 16))))
        grey, palette = rgb.convert("L"), rgb.convert("P")
        bits, deep = grey.convert("1"), grey.convert("I;16")

        def saved(image: PIL.Image.Image, kind: str, **options: Any) -> bytes:
            file = io.BytesIO()
            image.save(file, kind, **options)
            return file.getvalue()

        film: dict[str, Any] = {"save_all": True, "append_images": [palette.rotate(90), palette.rotate(180)]}
        made = [
            *(saved(image, "JPEG") for image in (rgb, grey, rgb.convert("CMYK"))),
            *(saved(image, "PNG") for image in (rgb, rgb.convert("RGBA"), palette, bits, deep)),
            *(saved(palette, "GIF"), saved(palette, "GIF", **film), saved(rgb, "BMP"), saved(grey, "BMP")),
            *(saved(rgb, "WEBP"), saved(rgb, "WEBP", lossless=True), saved(rgb, "WEBP", **film)),
            *(saved(rgb, "TIFF", compression=name) for name in (None, "tiff_lzw", "packbits", "jpeg", "tiff_deflate")),
            *(saved(bits, "TIFF", compression="group4"), saved(deep, "TIFF")),
        ]
        progressive = saved(rgb.resize((40, 40)), "JPEG", progressive=True)
        self.seeds = [{"image": data} for data in (*made, progressive)]
        self.pieces = PIECES["disguise"]
        size, png, end = progressive.index(b"\xff\xc2") + 5, made[3], png_chunk(b"IEND")
        wide, large = (
            png[:8] + png_chunk(b"IHDR", struct.pack(">II", *sides) + png[24:29])
            for sides in ((60_000, 300), (8_000, 8_000))
        )
        hostile = (
            progressive[:size] + struct.pack(">HH", 11_000, 11_000) + progressive[size + 4 :],
            png[:33] + png_chunk(b"zTXt", b"a\0\0" + zeros()) * 3 + png[33:],
            wide + png_chunk(b"IDAT", zeros()) + end,
            large + png[33:],
            png[:8] + end,
            *self.pieces,
        )
        self.triggers = [self.case(0, {"image": data}) for data in hostile]

    def read(self, case: Case, place: Path) -> None:
        data = b"" if case.odd else (place / "image").read_bytes()
        image_type(data)
        pixels = decode(data)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.flags.writeable:
            raise oracle.Wrong(f"decoded to {pixels.dtype} of shape {pixels.shape}")
        width, height = image_size(data)
        # A large JPEG may be decoded at 1/2, 1/4 or 1/8 of its size.
        sides = {(-(-height // part), -(-width // part)) for part in (1, 2, 4, 8)}
        if pixels.shape[:2] not in sides | {side[::-1] for side in sides}:
            raise oracle.Wrong(f"its header says {width} x {height}, and it decodes to {pixels.shape}")
