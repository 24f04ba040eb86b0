"""Encoded images: their type, their size and their pixels."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitpar.errors import DataError

try:
    import simplejpeg
except ImportError:  # `vitpar doctor` says so; Pillow reads JPEGs too, more slowly
    simplejpeg = None

# How the bytes of a type begin, and the extension that a shard gives it.
_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
IMAGE_TYPES = ("jpg", "png", "gif", "bmp", "tif", "webp")
FILE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")


class BadImage(DataError):
    """Bytes that cannot be decoded. The loader may skip such a sample; every other error of a data set ends the run."""


def image_type(data: bytes) -> str | None:
    """Which of IMAGE_TYPES the bytes are, by how they begin and whatever the file was called; None for no image."""
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels, from the header alone. Raises BadImage."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except Exception as error:  # damaged bytes make decoders raise nearly anything
        raise BadImage(f"its header cannot be read ({_reason(error)})") from error


def decode(data: bytes) -> NDArray[np.uint8]:
    """The pixels as writable RGB, uint8 [height, width, 3]; grey is repeated, alpha dropped. Raises BadImage."""
    if simplejpeg is not None and data[:2] == b"\xff\xd8":
        try:
            return simplejpeg.decode_jpeg(data, strict=True)
        except ValueError:
            pass  # strict also refuses harmless flaws; Pillow tells those from real damage
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _rgb(image)
    except Exception as error:  # damaged bytes make decoders raise nearly anything
        raise BadImage(f"it cannot be decoded ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    # Pillow's own words name the buffer by its address, which would be another one every time.
    return "of no known image format" if isinstance(error, UnidentifiedImageError) else str(error)


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip 16-bit grey at 255
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode '{image.mode}' have no fixed range; use 8 or 16 bits")
    return np.array(image.convert("RGB"))
