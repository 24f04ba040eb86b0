"""Zip files with wrong headers, and zip bombs."""

from __future__ import annotations

import functools
import io
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable

from fuzzing.attacks.images import BOMB_BYTES, zeros

LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"
_LOCAL_FIELDS = {
    "flags": (6, 2),
    "method": (8, 2),
    "crc": (14, 4),
    "packed": (18, 4),
    "size": (22, 4),
    "name": (26, 2),
    "extra": (28, 2),
}
_CENTRAL_FIELDS = {"flags": (8, 2), "method": (10, 2), "crc": (16, 4), "packed": (20, 4), "size": (24, 4)}
_CENTRAL_FIELDS |= {"name": (28, 2), "extra": (30, 2), "comment": (32, 2), "disk": (34, 2), "offset": (42, 4)}
_END_FIELDS = {
    "disks": (4, 2),
    "here": (8, 2),
    "entries": (10, 2),
    "bytes": (12, 4),
    "offset": (16, 4),
    "comment": (20, 2),
}
_VALUES = (0, 1, 2, 8, 9, 12, 14, 99, 0xFF, 0x800, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF)


def packed(entries: Iterable[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Return a zip file of the entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about duplicate names
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def attack(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change a field of a header, change an entry or add one; return the bytes and a description."""
    kind = draw.choice(
        ("central", "central", "central", "local", "local", "end", "end", "bomb", "bomb", "twice", "names")
    )
    if kind in ("central", "local", "end"):
        fields, mark = {
            "central": (_CENTRAL_FIELDS, CENTRAL),
            "local": (_LOCAL_FIELDS, LOCAL),
            "end": (_END_FIELDS, END),
        }[kind]
        places = [i for i in range(len(data)) if data.startswith(mark, i)]
        if not places:
            return data, "nothing"
        field = draw.choice(sorted(fields))
        offset, width = fields[field]
        value = draw.choice(_VALUES) % (1 << 8 * width)
        place = draw.choice(places) + offset
        return data[:place] + value.to_bytes(width, "little") + data[place + width :], f"{kind} {field} {value}"
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
    name, content = draw.choice(entries)
    if kind == "bomb":
        claimed = draw.choice((BOMB_BYTES, len(content), 10, 0, 0xFFFFFFFF))
        return bombed(data, name, claimed), f"a bomb for {name} that claims {claimed:,} bytes"
    if kind == "twice":
        entries.append((name, draw.choice((content, b"", content[:10]))))
    else:
        places_ = [i for i, entry in enumerate(entries) if entry[0] == name]
        other = draw.choice(
            ("../" + name, "/" + name, name + "\0x", "", name + "/", "a" * 60_000, "\x1b[31m", name.upper())
        )
        entries[places_[0]] = (other, content)
    return packed(entries, zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED), kind


def bombed(data: bytes, name: str, claimed: int) -> bytes:
    """Return the zip file with its entry `name` replaced by BOMB_BYTES zeros.

    claimed: uncompressed size that the headers claim.
    """
    raw = zeros()[2:-4]  # without zlib's header and checksum
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist() if entry.filename != name]
    whole = packed(entries)
    place = whole.rfind(END)
    count, size, offset = struct.unpack_from("<HII", whole, place + 10)
    encoded = name.encode()
    crc = _crc_of_zeros()
    common = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, crc, len(raw), claimed, len(encoded), 0)
    local = LOCAL + common + encoded + raw
    central = CENTRAL + b"\x14\0" + common + struct.pack("<HHHII", 0, 0, 0, 0, offset) + encoded
    end = END + struct.pack("<HHHHIIH", 0, 0, count + 1, count + 1, size + len(central), offset + len(local), 0)
    return whole[:offset] + local + whole[offset : offset + size] + central + end


@functools.cache
def _crc_of_zeros() -> int:
    crc = 0
    for _ in range(BOMB_BYTES >> 20):
        crc = zlib.crc32(bytes(1 << 20), crc)
    return crc
