"""Headers of tar files with arbitrary fields and right checksums."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 512
END = bytes(2 * BLOCK)


def base256(number: int, width: int = 12) -> bytes:
    """Return a number in GNU's base-256 encoding, for numbers that are negative or too large for octal digits."""
    whole = number % (1 << 8 * width - 1)
    return bytes([(whole >> 8 * (width - 1)) | 0x80 | (0x40 if number < 0 else 0)]) + (
        whole % (1 << 8 * (width - 1))
    ).to_bytes(width - 1, "big")


def header(
    name: bytes,
    size: int | bytes,
    kind: bytes = b"0",
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    rest: bytes = b"",
) -> bytes:
    """Return a header with a right checksum.

    size: number, or the raw bytes of the field. rest: bytes from offset 345 on.
    """
    if isinstance(size, int):
        size = b"%011o\0" % size if 0 <= size < 1 << 33 else base256(size)
    begin = (
        name[:100].ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size[:12].ljust(12, b"\0") + b"00000000000\0"
    )
    end = kind[:1] + link[:100].ljust(100, b"\0") + magic.ljust(8, b"\0") + bytes(80) + rest
    whole = (begin + b" " * 8 + end).ljust(BLOCK, b"\0")[:BLOCK]
    return whole[:148] + b"%06o\0 " % sum(whole) + whole[156:]


def padded(content: bytes) -> bytes:
    """Return the content, padded with zeros to complete blocks."""
    return content + bytes(-len(content) % BLOCK)


def member(name: bytes, content: bytes, kind: bytes = b"0", **fields: bytes) -> bytes:
    """Return a member: header and padded content."""
    return header(name, len(content), kind, **fields) + padded(content)


def pax(records: Sequence[tuple[bytes, bytes]], kind: bytes = b"x") -> bytes:
    """Return a PAX extended header.

    kind: x for the next member, g for all later members.
    """
    content = b""
    for key, value in records:
        line = b" " + key + b"=" + value + b"\n"
        length = len(line) + 1
        while len(b"%d" % length) + len(line) != length:
            length += 1
        content += b"%d" % length + line
    return member(b"pax", content, kind)
