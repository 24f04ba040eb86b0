"""Hostile words, numbers and parts of binary formats: what chance would hardly find."""

import gzip
import io
import re
import struct
import tomllib
import zipfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any

from helpers.hostile_files import header, pax, seal_tar, tar_member, tar_size
from helpers.tfrecord_files import example, feature, field, masked_crc, record, varint
from helpers.tiny_images import encoded

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 300, 512, 4_000, 16_384, 32_768, 60_000, 65_535, 1 << 20, (1 << 31) - 1)
NUMBERS = (*NUMBERS, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SIZES = (-(1 << 40), -512, -1, 513, *NUMBERS[-10:], 1 << 80)
BOMB_BYTES = 300 << 20
"""Size of a decompression bomb."""


def expanded(entry: Any) -> Any:
    """Return the words of a dictionary as texts: "x*3" is "xxx", and an inner list is joined."""
    if isinstance(entry, dict):
        return {key: expanded(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return tuple("".join(map(expanded, one)) if isinstance(one, list) else expanded(one) for one in entry)
    text, times = re.fullmatch(r"(.*?)(?:\*(\d+))?", entry, re.DOTALL).groups()  # type: ignore[union-attr]
    return text * int(times or 1)


def _read(name: str) -> dict[str, Any]:
    read: dict[str, Any] = expanded(tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8")))
    return read


WORDS = _read("dictionary.toml")
"""Hostile words, by kind of text."""
LONG = (*WORDS["long"], "\ud800")
"""Texts that no name may be."""
TEXTS = tuple(word for kind in ("toml", "json", "tar") for words in WORDS[kind].values() for word in words)
"""Hostile words for files of texts."""
TOKENS = tuple(word.encode() for word in WORDS["tokens"])
PIECES = {kind: tuple(piece.encode("latin-1") for piece in pieces) for kind, pieces in _read("pieces.toml").items()}
"""Hostile parts by format."""
WHOLE_PICKLES = (
    *(b"\x80\x02" + part + b"." for part in PIECES["pickle"]),
    *(b"%c." % code for code in b"N(021asbRQ"),
    b"",
)


@cache
def zeros() -> bytes:
    """Return BOMB_BYTES zeros, compressed with zlib to about a thousandth of their size."""
    return zlib.compress(bytes(BOMB_BYTES), 9)


@cache
def gzip_zeros() -> bytes:
    """Return BOMB_BYTES zeros as one member of a gzip file; more members may follow."""
    return gzip.compress(bytes(BOMB_BYTES), mtime=0)


def zip_bomb(name: str, claimed: int) -> bytes:
    """Return a zip file with one entry of BOMB_BYTES zeros, whose headers claim `claimed` bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, bytes(BOMB_BYTES))
    return file.getvalue().replace(struct.pack("<I", BOMB_BYTES), struct.pack("<I", claimed))


def png_chunk(kind: bytes, body: bytes = b"") -> bytes:
    """Return a chunk of a PNG with its length and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@cache
def png_pieces() -> tuple[bytes, ...]:
    """Return hostile chunks of a PNG, some of which unpack to BOMB_BYTES zeros."""
    bombs = (b"zTXt" + b"a\0\0", b"iCCP" + b"a\0\0", b"iTXt" + b"a\0\1\0\0\0", b"IDAT")
    return (*PIECES["png"], *(png_chunk(begin[:4], begin[4:] + zeros()) for begin in bombs))


TAR_WIDTHS = (100, 8, 8, 8, 12, 12, 8, 1, 100, 6, 2, 32, 32, 8, 8, 155)
TAR_FIELDS = tuple((sum(TAR_WIDTHS[:number]), width) for number, width in enumerate(TAR_WIDTHS))
"""Place of each field of a header: first byte, number of bytes."""
TAR = {kind: tuple(word.encode() for word in words) for kind, words in WORDS["tar"].items()}
TAR_TEXTS = (
    *map(tar_size, SIZES),
    *TAR["numbers"],
    *TAR["names"],
    *(b"%c" % kind for kind in b"1234567SVMNALKxg\xff\0"),
)
LINK = tar_member("././@LongLink", b"0000.png\0", b"L")
TAR_PIECES = (
    *(LINK * 5_000, pax(b"mtime=1") * 5_000, pax(b"mtime=1", b"g") * 400, bytes(1024) + LINK),
    *(pax(b"size=%s" % size, kind) for size in (*TAR["numbers"], *map(b"%d".__mod__, SIZES)) for kind in (b"x", b"g")),
    *(pax(b"path=" + name) for name in TAR["names"]),
    *(pax(b"GNU.sparse." + record) for record in (b"map=0,1099511627776", b"realsize=1099511627776", b"major=x")),
    *(tar_member("pax", line, kind) for line in TAR["pax"] for kind in (b"x", b"g")),
    *(tar_member("././@LongLink", b"", kind, size) for size in SIZES for kind in (b"L", b"K", b"x", b"g", b"0")),
    *(tar_member("././@LongLink", name + b"\0", b"L") for name in TAR["names"]),
    seal_tar(header("0.png", b"S", 512)[:386] + (tar_size(1 << 40) * 8 + b"\1" + tar_size(1 << 40)).ljust(126, b"\0"))
    + bytes(512),
    *(tar_member("0000.cls", label) for label in TAR["labels"]),
    *(tar_member("0000.json", b'{"label": %s}' % label) for label in TAR["labels"]),
    *(tar_member("0000.png", image) for image in (b"", b"GIF89a", PIECES["disguise"][0], b"\xff" * 1000)),
    b"".join(tar_member(f"{i:08}.{('cls', 'png', 'txt')[i % 3]}", b"") for i in range(3_000)),
    *(bytes(512), bytes(1024), bytes(2 << 20), bytes(40 << 20), b"x", b"\xff" * 10_240),
)
IMAGE = encoded(0)
VARINTS = tuple(map(varint, (*NUMBERS, 99_999, 1_000_000, 1_000_001)))
MESSAGES = (
    *(b"", b"\x0a\x7f" * 1_000, field(1, varint(3 << 3) * 20_000) + example(IMAGE, 1)),
    *(field(1, feature("image/encoded", kind, IMAGE) * times) for kind in (1, 2, 3) for times in (1, 300)),
    *(example(IMAGE, 1, name) for name in ("", "\0", "\x1b[31m", "x" * 100_000)),
    *(field(1, feature("image/class/label", 3, said + n)) for n in VARINTS for said in (b"\x08", b"\x0a" + n)),
    *(field(1, b"\x0a" + number + b"image/encoded") for number in VARINTS),
)
"""Messages of TFRecords with wrong lengths, labels, types and names."""
RECORDS = (
    *(*map(record, MESSAGES), record(b"") * 10_000),
    *(size + masked_crc(size) + b"x" * 20 for size in (struct.pack("<Q", size % (1 << 64)) for size in SIZES)),
)
