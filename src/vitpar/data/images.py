"""Encoded images: their type, their size and their pixels."""

import io
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from vitpar.errors import DataError
from vitpar.limits import MAX_DECODED_BYTES, MAX_PIXELS
from vitpar.text import shown

try:
    import simplejpeg
except ImportError:  # `vitpar doctor` reports it; Pillow decodes JPEGs too, but more slowly
    simplejpeg = None

# First bytes of each image type, and the file extension of that type in shards.
_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"II+\0", "tif"),  # BigTIFF, with 64-bit offsets
    (b"MM\0+", "tif"),
)
_DECODERS = {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "bmp": "BMP", "tif": "TIFF", "webp": "WEBP"}
"""Pillow's decoder for each type. No other may run: the EPS decoder starts Ghostscript, which executes the file."""

IMAGE_TYPES = tuple(_DECODERS)
"""Supported image types, named by their extension in shards."""
FILE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
"""Suffixes of image files in a source folder, in lower case."""

_ORIENTATION = 0x0112  # Exif tag
_LYING = (5, 6, 7, 8)  # orientations that exchange width and height
_EXIF, _SCAN, _BASELINE = 0xE1, 0xDA, 0xC0  # markers of a JPEG's segments
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of the segments that have its size


GPU_DECODED_BYTES = 1 << 27
"""Most bytes of decoded images that a GPU makes at a time, unless one image has more."""
BadSample = Literal["fail", "skip"]
"""Treatment of a bad sample: "fail" raises DataError, "skip" leaves it out and counts it."""


class BadImage(DataError):
    """Error for a sample whose bytes are damaged or cannot be decoded.

    The loader may skip such a sample; every other error of a data set ends the run.
    """


def image_type(data: bytes) -> str | None:
    """Return which of IMAGE_TYPES the bytes are, by their first bytes and not by a file name; None for no image."""
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    return "webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


class EncodedImage(NamedTuple):
    """Encoded image and the facts in its header. `opened` makes it."""

    data: bytes
    """The complete file."""
    kind: str
    """One of IMAGE_TYPES."""
    width: int
    """Width in pixels as stored, before Exif orientation is applied."""
    height: int
    """Height in pixels as stored."""
    orientation: int | None = None
    """Exif orientation, 1 to 8, of which 1 means upright; None for types that are decoded to know it."""
    simple: bool = False
    """Whether it is a baseline JPEG of one or three components, whose header is whole."""

    @property
    def halved(self) -> bool:
        """Whether it is a JPEG that is decoded at half its width and height."""
        return 3 * self.width * self.height > MAX_DECODED_BYTES

    @property
    def shape(self) -> tuple[int, int] | None:
        """Height and width after decoding; None if they are known only then."""
        if self.orientation is None or self.halved:
            return None
        return (self.width, self.height) if self.orientation in _LYING else (self.height, self.width)

    @property
    def for_gpu(self) -> bool:
        """Whether GPUs decode it: an upright baseline JPEG, grey or in colour, of its full size."""
        return self.simple and self.orientation == 1 and not self.halved

    def decoded(self, *, strict: bool = False) -> NDArray[np.uint8]:
        """Return the pixels of `decode`."""
        if simplejpeg is not None and self.kind == "jpg":
            half = {"min_width": -(-self.width // 2), "min_height": -(-self.height // 2), "min_factor": 2}
            try:
                pixels = simplejpeg.decode_jpeg(self.data, strict=True, **(half if self.halved else {}))
                return _upright(pixels, self.orientation or 1)
            except ValueError as error:
                if strict and _is_common(self.data):
                    raise BadImage(f"it cannot be decoded ({_reason(error)})") from error
        try:
            with _opened(self.data, self.kind) as image:
                if self.halved:
                    image.draft(image.mode, (self.width // 2, self.height // 2))
                known = self.orientation
                return _upright(_rgb(image), _noted(image.getexif) if known is None else known)
        except Exception as error:  # damaged bytes make decoders raise nearly anything
            raise BadImage(f"it cannot be decoded ({_reason(error)})") from error


def image_size(data: bytes) -> tuple[int, int]:
    """Return (width, height) in pixels as stored, from the header alone; Exif orientation is not applied.

    Raises BadImage as `opened` does.
    """
    image = opened(data)
    return image.width, image.height


def opened(data: bytes) -> EncodedImage:
    """Read the header of an encoded image.

    Raises BadImage, also for a JPEG of more than MAX_PIXELS pixels, and for an image of another type that decodes to
    more than MAX_DECODED_BYTES.
    """
    if (kind := image_type(data)) is None:
        raise BadImage("its image format is unknown")
    try:
        found = _jpeg_header(data) if kind == "jpg" else None
        if found is None:
            with _opened(data, kind) as image:
                found = EncodedImage(data, kind, *image.size, _noted(image.getexif) if kind == "jpg" else None)
    except Exception as error:  # damaged bytes make decoders raise nearly anything
        raise BadImage(f"its header cannot be read ({_reason(error)})") from error
    most = MAX_PIXELS if kind == "jpg" else MAX_DECODED_BYTES // 3
    if found.width * found.height > most:
        raise BadImage(f"it has {found.width} x {found.height} pixels, more than {most:,}")
    return found


def _jpeg_header(data: bytes) -> EncodedImage | None:
    """Read the header of a JPEG in one walk over its segments; None if it is damaged or of a rare kind.

    Decoding threads hold Python's lock meanwhile.
    """
    place, size, orientation, simple = 3, (0, 0), 1, False  # the first marker follows SOI and 0xFF
    while place < len(data) - 8 and data[place - 1] == 0xFF:
        marker, length = data[place], data[place + 1] << 8 | data[place + 2]
        if marker == _SCAN:
            return EncodedImage(data, "jpg", *size, orientation, simple) if all(size) else None
        if marker in _FRAMES:
            size = data[place + 6] << 8 | data[place + 7], data[place + 4] << 8 | data[place + 5]
            simple = marker == _BASELINE and data[place + 8] in (1, 3)
        elif marker == _EXIF and data.startswith(b"Exif\0\0", place + 3):
            orientation = _noted(partial(_exif, data[place + 3 : place + 1 + length]))
        place += length + 2
    return None


def _noted(exif: Callable[[], Image.Exif]) -> int:
    """Return the orientation in an Exif header; 1, which means upright, if there is none or it is damaged."""
    try:
        return int(exif().get(_ORIENTATION, 1))
    except Exception:  # damaged headers make it raise nearly anything; the pixels may still be good
        return 1


def _exif(data: bytes) -> Image.Exif:
    exif = Image.Exif()
    exif.load(data)
    return exif


def _opened(data: bytes, kind: str) -> Image.Image:
    return Image.open(io.BytesIO(data), formats=(_DECODERS[kind],))


def decode(data: bytes, *, strict: bool = False) -> NDArray[np.uint8]:
    """Decode an image to writable RGB, uint8 [height, width, 3], with Exif orientation applied.

    Grey is repeated over the channels and alpha is dropped. A JPEG that would decode to more than MAX_DECODED_BYTES is
    decoded at half its width and height.

    strict: refuse a JPEG for which libjpeg gives a warning. It warns of most flipped bits, but also of some harmless
        flaws of old encoders. Meant for bytes that have no checksum.

    Raises BadImage.
    """
    return opened(data).decoded(strict=strict)


def _is_common(data: bytes) -> bool:
    """Return whether libjpeg-turbo converts this kind of JPEG to RGB, so that its error means damaged bytes."""
    with suppress(ValueError, KeyError):
        return simplejpeg.decode_jpeg_header(data, strict=False)[2] in ("YCbCr", "RGB", "Gray")
    return False


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Rotate and mirror pixels according to an Exif orientation."""
    if orientation in _LYING:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _reason(error: Exception) -> str:
    # Pillow's own message contains the address of the buffer, which differs between runs.
    return "unknown image format" if isinstance(error, UnidentifiedImageError) else shown(error)


def _rgb(image: Image.Image) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16"):  # Pillow's own conversion clips 16-bit grey at 255
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode '{image.mode}' have no fixed range; use 8 or 16 bits")
    return np.array(image.convert("RGB"))
