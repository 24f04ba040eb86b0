"""TFRecords of protocol buffers with wrong lengths, labels and structure. Checksums are recomputed."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

LENGTHS = (0, 1, 127, 128, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_TABLE: list[int] = []


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum."""
    if not _TABLE:
        for byte in range(256):
            for _ in range(8):
                byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
            _TABLE.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """Return the masked checksum as TFRecords store it."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def record(content: bytes, length: int | None = None) -> bytes:
    """Return a TFRecord with both checksums.

    length: claimed length, None for the right one.
    """
    size = struct.pack("<Q", len(content) if length is None else length % (1 << 64))
    return size + masked(size) + content + masked(content)


def varint(number: int, width: int = 0) -> bytes:
    """Encode a number as a varint of at least `width` bytes."""
    number %= 1 << 64
    found = bytearray()
    while number > 127 or len(found) < width - 1:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes, length: int | None = None) -> bytes:
    """Return a length-delimited field.

    length: claimed length, None for the right one.
    """
    return varint(number << 3 | 2) + varint(len(content) if length is None else length) + content


def feature(name: bytes, kind: int, content: bytes) -> bytes:
    """Return an entry of the map of features.

    kind: 1 for bytes, 2 for floats, 3 for integers.
    """
    return field(1, field(1, name) + field(2, field(kind, content)))


def example(image: bytes, label: int, name: bytes) -> bytes:
    """Return a tensorflow.Example in the layout of ImageNet."""
    features = feature(b"image/encoded", 1, field(1, image)) + feature(b"image/class/label", 3, field(1, varint(label)))
    features += feature(b"image/class/synset", 1, field(1, name)) + feature(b"image/height", 3, field(1, varint(8)))
    return field(1, features)


def attack(draw: random.Random, examples: Sequence[tuple[bytes, int, bytes]]) -> tuple[bytes, str]:
    """Return a TFRecord file of the examples with one attack, and a description."""
    parts = [record(example(*one)) for one in examples]
    place = draw.randrange(len(parts))
    image, label, name = examples[place]
    kind = draw.choice(
        ("length", "length", "field", "field", "label", "name", "shape", "edit", "empty", "many", "nested", "cut")
    )
    whole = example(image, label, name)
    match kind:
        case "length":
            parts[place] = record(whole, draw.choice((*LENGTHS, len(whole) - 1, len(whole) + 1)))
        case "field":
            lie = field(1, image, draw.choice((*LENGTHS, len(image) + 1, len(image) - 1)))
            whole = field(
                1, feature(b"image/encoded", 1, lie) + feature(b"image/class/label", 3, field(1, varint(label)))
            )
            parts[place] = record(whole)
        case "label":
            value = draw.choice((-1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 99_999, 1_000_000, 1_000_001))
            said = draw.choice(
                (field(1, varint(value)), varint(8) + varint(value), field(1, varint(1) * 1_000), b"", b"\x08")
            )
            whole = field(1, feature(b"image/encoded", 1, field(1, image)) + feature(b"image/class/label", 3, said))
            parts[place] = record(whole)
        case "name":
            parts[place] = record(
                example(image, label, draw.choice((b"", b"\xff\xfe", b"\0", b"\x1b[31m", b"x" * 100_000)))
            )
        case "shape":
            entry = feature(
                draw.choice((b"image/encoded", b"image/class/label", b"", b"x" * 1_000)), draw.choice((1, 2, 3)), image
            )
            parts[place] = record(field(draw.choice((1, 2)), entry * draw.choice((1, 2, 300))))
        case "edit":
            changed = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(min(len(changed), 80))] = draw.choice((0, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            parts[place] = record(bytes(changed))
        case "empty":
            parts[place] = record(b"") * draw.choice((1, 10_000))
        case "many":
            parts[place] = record(field(1, varint(3 << 3) + varint(0)) * draw.choice((10, 20_000)) + whole)
        case "nested":
            inside = image
            for _ in range(draw.choice((10, 2_000))):
                inside = field(1, inside)
            parts[place] = record(inside)
        case _:
            parts[place] = parts[place][: draw.randrange(len(parts[place]))]
    return b"".join(parts), kind
