"""Tar files with wrong headers. Checksums are right, so that readers get past them."""

from __future__ import annotations

import gzip
import lzma
import random
from collections.abc import Callable

from fuzzing.attacks.images import zeros
from fuzzing.attacks.jsons import JSON_BOMBS
from fuzzing.attacks.tar_headers import BLOCK, END, base256, header, member, padded, pax
from fuzzing.seeds import Members

SIZES = (
    -(1 << 40),
    -BLOCK,
    -1,
    0,
    1,
    511,
    513,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 33,
    1 << 40,
    (1 << 63) - 1,
    1 << 80,
)
NUMBERS = (
    b"-1",
    b"",
    b"0",
    b"1e9",
    b"1.5",
    b" 12",
    b"0x10",
    b"99999999999999999999",
    b"9" * 5_000,
    "\u0661".encode(),
    b"1_0",
)
LABELS = (b"", b"-1", b"3", b" 2\n", b"+1", b"1_0", b"1e3", b"NaN", b"9" * 5_000, b"2147483648", b"1000000", b"99999")
LABELS = (*LABELS, "\u0661".encode(), b"\0", b"\xff\xfe", b"x" * 100_000)
LINKS = (b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"V", b"M", b"N", b"A", b"\xff")


def attack(draw: random.Random, members: Members, labels: str) -> tuple[bytes, str]:
    """Return a tar file of the members with one attack, and a description.

    labels: kind of their labels (cls, json or folder).
    """
    parts = [member(name.encode(), content) for name, content in members]
    place = draw.randrange(len(parts))
    whole = draw.choice(WHOLE) if draw.random() < 0.3 else None
    if whole is not None:
        return whole(draw, b"".join(parts) + END), whole.__name__.strip("_")
    change = draw.choice(PARTS)
    name, content = members[place]
    parts[place] = change(draw, name.encode(), content)
    return b"".join(parts) + END, f"{name}: {change.__name__.strip('_')}"


Part = Callable[[random.Random, bytes, bytes], bytes]
Whole = Callable[[random.Random, bytes], bytes]


def _size(draw: random.Random, name: bytes, content: bytes) -> bytes:
    return header(name, draw.choice(SIZES)) + padded(content)


def _size_field(draw: random.Random, name: bytes, content: bytes) -> bytes:
    field = draw.choice(
        (b"77777777777", b"999999999999", b"-0000000001", b"", b" ", b"\x80", b"\xff", draw.randbytes(12))
    )
    return header(name, field) + padded(content)


def _pax_size(draw: random.Random, name: bytes, content: bytes) -> bytes:
    value = draw.choice((*NUMBERS, b"%d" % draw.choice(SIZES), b"%d" % len(content)))
    return pax([(b"size", value)], draw.choice((b"x", b"x", b"g", b"X"))) + member(name, content)


def _pax_name(draw: random.Random, name: bytes, content: bytes) -> bytes:
    names = (b"../../" + name, b"/etc/" + name, b"a" * 100_000 + b".png", b"\xff\xfe.png", b"a\0b.png", b"", b"\n.png")
    return pax([(b"path", draw.choice(names))]) + member(name, content)


def _pax_lines(draw: random.Random, name: bytes, content: bytes) -> bytes:
    lines = (b"999999999 path=x\n", b"0 path=x\n", b"-5 path=x\n", b"path=x\n", b"5 a\n", b"10 path=x", b"\n" * 100)
    lines = (
        *lines,
        b"20 hdrcharset=BINARY\n11 path=\xff\n",
        b"9" * 5_000 + b" path=x\n",
        b"22 comment=" + b"x" * 1_000_000,
    )
    return member(b"pax", draw.choice(lines), draw.choice((b"x", b"g"))) + member(name, content)


def _claimed(draw: random.Random, name: bytes, content: bytes) -> bytes:
    return header(b"././@LongLink", draw.choice(SIZES), draw.choice((b"L", b"K", b"x", b"g"))) + member(name, content)


def _long_name(draw: random.Random, name: bytes, content: bytes) -> bytes:
    longer = draw.choice((b"a/" * 60, b"a" * 70_000, b"../" * 50, b"\xc3\x28" * 60)) + name
    return member(b"././@LongLink", longer + b"\0", draw.choice((b"L", b"L", b"K"))) + member(name[:99], content)


def _chain(draw: random.Random, name: bytes, content: bytes) -> bytes:
    """Put many extension headers before a member: a recursive reader would exhaust its stack."""
    links = (member(b"././@LongLink", name + b"\0", b"L"), pax([(b"mtime", b"1")]), pax([(b"mtime", b"1")], b"g"))
    return draw.choice(links) * draw.choice((2, 400, 5_000)) + member(name, content)


def _kind(draw: random.Random, name: bytes, content: bytes) -> bytes:
    target = draw.choice((b"/etc/passwd", name, b"../../secret", b"0000.png", b""))
    return header(name, draw.choice((0, len(content))), draw.choice(LINKS), target) + padded(content)


def _sparse(draw: random.Random, name: bytes, content: bytes) -> bytes:
    """Make the member sparse, in the old GNU format or one of the PAX formats."""
    if draw.random() < 0.5:
        pairs = b"".join(
            draw.choice((b"%011o\0" % draw.randrange(4096), base256(draw.choice(SIZES)))) for _ in range(8)
        )
        real = base256(draw.choice((1 << 40, len(content), -1)))
        return header(name, len(content), b"S", magic=b"ustar  \0", rest=bytes(41) + pairs + b"\1" + real) + padded(
            content
        )
    big = b"%d" % draw.choice((1 << 40, 1 << 31, len(content)))
    ways = (
        [(b"GNU.sparse.map", b"0," + big), (b"GNU.sparse.size", big)],
        [
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", name),
            (b"GNU.sparse.realsize", big),
        ],
        [(b"GNU.sparse.numblocks", b"1"), (b"GNU.sparse.offset", b"0"), (b"GNU.sparse.numbytes", big)],
        [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"x"), (b"GNU.sparse.realsize", b"x")],
    )
    body = draw.choice((content, b"1\n0\n" + big + b"\n", b"9" * 5_000 + b"\n"))
    return pax(draw.choice(ways)) + member(name, body)


def _label(draw: random.Random, name: bytes, content: bytes) -> bytes:
    """Add a label that is invalid or that no data set has."""
    key = name.partition(b".")[0]
    json = (
        b'{"label": %s}' % draw.choice((*LABELS, b"1.0", b"true", b'"2"', b"[1]", b"null")),
        draw.choice(JSON_BOMBS),
    )
    label = (b".cls", draw.choice(LABELS)) if draw.random() < 0.5 else (b".json", draw.choice(json))
    return member(key + label[0], label[1]) + (b"" if name.endswith(label[0]) else member(name, content))


def _image(draw: random.Random, name: bytes, content: bytes) -> bytes:
    return member(
        name, draw.choice((b"", b"GIF89a", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\xff" * 1000, content[: len(content) // 2]))
    )


def _name(draw: random.Random, name: bytes, content: bytes) -> bytes:
    names = (
        b"",
        b".",
        b"/",
        b".png",
        b"..",
        b"a/../" + name,
        b"/" + name,
        b"\xff\xfe" + name,
        name.upper(),
        b"a" * 100,
    )
    names = (
        *names,
        b"\x1b[31m" + name,
        b"x.y.z.png",
        b"a/.png",
        b"\xe2\x80\xae" + name,
        b"0001.png",
        b"0000.cls",
        b"__key__.png",
    )
    prefix = draw.choice((b"", b"", b"p" * 155, b"\xff" * 10))
    return header(draw.choice(names), len(content), rest=prefix.ljust(155, b"\0")) + padded(content)


def _twice(draw: random.Random, name: bytes, content: bytes) -> bytes:
    return member(name, content) * 2


def _gone(draw: random.Random, name: bytes, content: bytes) -> bytes:
    return b""


def _checksum(draw: random.Random, name: bytes, content: bytes) -> bytes:
    whole = member(name, content)
    return (
        whole[:148] + draw.choice((b"0000000\0", bytes(8), b"777777\0 ", b"\xff" * 8, b"-1\0\0\0\0\0\0")) + whole[156:]
    )


def _magic(draw: random.Random, name: bytes, content: bytes) -> bytes:
    return header(
        name, len(content), magic=draw.choice((bytes(8), b"ustar  \0", b"ustar\x0099", b"\xff" * 8))
    ) + padded(content)


def _many(draw: random.Random, name: bytes, content: bytes) -> bytes:
    """Return many empty members."""
    count = draw.choice((100, 3_000, 20_000))
    return b"".join(header(b"%08d.%s" % (i, draw.choice((b"cls", b"png", b"txt"))), 0) for i in range(count))


def _twice_over(draw: random.Random, whole: bytes) -> bytes:
    return whole * draw.choice((2, 3))


def _garbage(draw: random.Random, whole: bytes) -> bytes:
    return whole + draw.choice((b"x", draw.randbytes(BLOCK), draw.randbytes(20_000), bytes(BLOCK) + b"x"))


def _padding(draw: random.Random, whole: bytes) -> bytes:
    return whole + bytes(draw.choice((1, BLOCK, 9_216, 2 << 20, 40 << 20)))


def _no_end(draw: random.Random, whole: bytes) -> bytes:
    return whole[: -draw.choice((1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK))]


def _zero_block(draw: random.Random, whole: bytes) -> bytes:
    place = BLOCK * draw.randrange(len(whole) // BLOCK)
    return whole[:place] + bytes(draw.choice((1, 2, 3)) * BLOCK) + whole[place:]


def _cut(draw: random.Random, whole: bytes) -> bytes:
    return whole[: draw.randrange(len(whole))]


def _compressed(draw: random.Random, whole: bytes) -> bytes:
    ways = (gzip.compress(whole, mtime=0), lzma.compress(whole), b"BZh9" + whole, gzip.compress(whole, mtime=0)[:-8])
    return draw.choice((*ways, b"\x1f\x8b\x08\0\0\0\0\0\2\xff" + zeros()[2:]))


def _empty(draw: random.Random, whole: bytes) -> bytes:
    return draw.choice((b"", END, bytes(BLOCK), b"\0", bytes(10_240), b"\xff" * 10_240))


PARTS: tuple[Part, ...] = (
    *(_size, _size, _size_field, _pax_size, _pax_size, _pax_name, _pax_lines, _claimed, _claimed, _long_name, _chain),
    *(_kind, _sparse, _label, _label, _image, _name, _name, _twice, _gone, _checksum, _magic, _many),
)
WHOLE: tuple[Whole, ...] = (_twice_over, _garbage, _padding, _no_end, _zero_block, _cut, _compressed, _empty)
