"""Edits that know a format: where its numbers are, how it splits into parts, and how its checksums are computed."""

import gzip
import io
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import strategies as st

from fuzzing import hostile
from fuzzing.case import Draw
from fuzzing.edits import NUMBERS, bytes_edited, json_edited, line_edited, pick, toml_edited
from fuzzing.hostile import PIECES
from helpers.tfrecord_files import record

MOST_REPEATED = 1 << 21
"""Most bytes that repeating a part adds."""
BROKEN = (ValueError, IndexError, OSError, EOFError, RuntimeError, struct.error, zlib.error, zipfile.BadZipFile)
"""Errors of splitting a file whose structure an earlier edit broke."""
Parts = list[bytes]


class Format(NamedTuple):
    """Structure of a format."""

    begin: bytes
    """Regular expression of its first bytes."""
    headers: tuple[tuple[bytes, int, str], ...] = ()
    """Headers: regular expression of bytes near them, distance from there, and layout in the words of `struct`."""
    split: Callable[[bytes], Parts] = lambda data: [data]
    """Function that splits a valid file into parts."""
    join: Callable[[Parts], bytes] = b"".join
    """Function that makes a file of parts, with right lengths and checksums."""
    pieces: Callable[[], tuple[bytes, ...]] = lambda: ()
    """Hostile parts; they replace a part or come before one, with all that is wrong in them."""
    seal: Callable[[bytes], bytes] | None = None
    """Function that corrects checksums, but not lengths."""


def edited(draw: Draw, name: str, data: bytes) -> tuple[bytes, bool]:
    """Return a file with one to three edits, and whether its checksums are right afterwards."""
    sealed = False
    for _ in range(draw(st.integers(1, 3))):
        try:
            data, known = _once(draw, name, data)
            sealed |= known
        except BROKEN:
            data = bytes_edited(draw, data)
    return data, sealed


def _once(draw: Draw, name: str, data: bytes) -> tuple[bytes, bool]:
    form = next((form for form in FORMATS if re.match(form.begin, data, re.DOTALL)), None)
    if form is None or pick(draw, (False, False, True)):
        text = json_edited if data[:1] in (b"{", b"[") else toml_edited if name.endswith(".toml") else bytes_edited
        text = line_edited if name.endswith((".jsonl", ".txt", ".csv")) else text
        return pick(draw, (text, text, bytes_edited))(draw, data), False
    if form.headers and draw(st.booleans()):
        lie = _lie(draw, data, form)
        return (form.seal(lie), True) if form.seal else (lie, False)
    parts, pieces = form.split(data), form.pieces()
    place = pick(draw, range(len(parts)))
    match pick(draw, ("piece", "piece", "edit", "edit", "repeat", "move")):
        case "piece" if pieces:
            rest = form.join(parts[place + draw(st.integers(0, 1)) :])
            return form.join(parts[:place]) + pick(draw, pieces) + rest, True
        case "repeat":
            end = draw(st.integers(place, len(parts)))
            size = 1 + sum(map(len, parts[place:end]))
            parts[place:end] = parts[place:end] * min(pick(draw, (0, 2, 3, 50, 3000)), MOST_REPEATED // size + 2)
        case "move":
            parts.insert(pick(draw, range(len(parts))), parts.pop(place))
        case _:
            parts[place] = _once(draw, "", parts[place])[0] if parts[place] != data else bytes_edited(draw, data)
    return form.join(parts), True


def _lie(draw: Draw, data: bytes, form: Format) -> bytes:
    """Overwrite one number or text of a header."""
    near, shift, layout = pick(draw, form.headers)
    places = [match.start() + shift for match in re.finditer(near, data, re.DOTALL)]
    place = pick(draw, [place for place in places if place >= 0])
    order, codes = layout[0], re.findall(r"\d*[a-zA-Z]", layout)
    which = pick(draw, range(len(codes)))
    place += struct.calcsize(order + "".join(codes[:which]))
    width = struct.calcsize(order + codes[which])
    if codes[which].endswith("s"):
        new = pick(draw, hostile.TAR_TEXTS)[:width].ljust(width, pick(draw, (b"\0", b" ")))
    else:
        number = pick(draw, NUMBERS) if draw(st.booleans()) else draw(st.integers(0, 256**width - 1))
        new = (number % 256**width).to_bytes(width, "little" if order == "<" else "big")
    return data[:place] + new + data[place + width :]


def split_at(pattern: bytes) -> Callable[[bytes], Parts]:
    """Return the function that splits data where the pattern begins."""
    return lambda data: re.split(b"(?s)(?=" + pattern + b")", data)


def join_png(parts: Parts) -> bytes:
    """Return a PNG, or chunks of one."""
    return b"".join(part if part[:4] == b"\x89PNG" else hostile.png_chunk(part[:4], part[4:]) for part in parts)


def split_png(data: bytes) -> Parts:
    """Return the signature, and kind and content of each chunk."""
    parts, place = [data[:8]], 8
    while place + 12 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        parts.append(data[place + 4 : place + 8 + size])
        place += size + 12
    return parts


def split_tar(data: bytes) -> Parts:
    """Return headers and contents in turn, and the end."""
    parts, place = Parts(), 0
    while data[place : place + 1] not in (b"", b"\0"):
        size = int(data[place + 124 : place + 135] or b"0", 8)
        parts += [data[place : place + 512], data[place + 512 : place + 512 + size]]
        place += 512 + size + -size % 512
    return [*parts, data[place:]]


def join_tar(parts: Parts) -> bytes:
    """Return a tar file whose headers have the sizes of the parts that follow them."""
    whole = b""
    for part, body in zip(parts, [*parts[1:], b"ustar"], strict=True):
        if part[257:262] == b"ustar" and len(part) == 512 and body[257:262] != b"ustar":
            part = part[:124] + b"%011o\0" % len(body) + part[136:]
        whole += part + bytes(-len(part) % 512)
    return hostile.seal_tar(whole)


def split_zip(data: bytes) -> Parts:
    """Return the entries, each as its name, a zero and its content."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [entry.filename.encode() + b"\0" + archive.read(entry) for entry in archive.infolist()]


def join_zip(parts: Parts) -> bytes:
    """Return a zip file of such entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about duplicate names
        for part in parts:
            name, _, body = part.partition(b"\0")
            archive.writestr(zipfile.ZipInfo(name.decode(errors="replace") or "x"), body)
    return file.getvalue()


def split_records(data: bytes) -> Parts:
    """Return the messages of a TFRecord file."""
    parts, place = Parts(), 0
    while place < len(data):
        size = int.from_bytes(data[place : place + 8], "little")
        parts.append(data[place + 12 : place + 12 + size])
        place += size + 16
    return parts


def join_records(parts: Parts) -> bytes:
    """Return a TFRecord file with right checksums."""
    return b"".join(map(record, parts))


def split_tensors(data: bytes) -> Parts:
    """Return the header and the data of a safetensors file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return [data[8:end], data[end:]]


def join_tensors(parts: Parts) -> bytes:
    """Return a safetensors file with the right length of the header."""
    return len(parts[0]).to_bytes(8, "little") + b"".join(parts)


def split_pickle(data: bytes) -> Parts:
    """Return the instructions of a pickle."""
    places = [place for _, _, place in pickletools.genops(data) if place is not None]
    return [data[begin:end] for begin, end in zip(places, [*places[1:], len(data)], strict=True)]


SOF, ENTRY = rb"\xff[\xc0-\xc3]\0.\x08", rb"[\0-\x53]\x01[\1-\5]\0.\0\0\0"
ZIP = ((rb"PK\x03\x04", 4, "<HHHHHIIIHH"), (rb"PK\x01\x02", 4, "<HHHHHHIIIHHHHHII"), (rb"PK\x05\x06", 4, "<HHHHIIH"))
TAR = ((rb"ustar", -257, ">100s8s8s8s12s12s8s1s100s8s32s32s8s8s155s"),)
JPEG = ((SOF, 2, ">HBHHB3B3B"), (rb"\xff[\xc4\xda\xdb\xe0-\xe2]", 2, ">H"))
PNG = ((rb"IHDR", 4, ">IIBBBBB"), (rb"IDAT|PLTE|acTL", -4, ">I"))
GIF, TIFF = ((rb"\A", 6, "<HHBBB"), (rb",", 1, "<HHHHBB")), ((rb"\A", 4, "<I"), (ENTRY, 0, "<HHII"))
WEBP, PICKLE = ((rb"\A", 4, "<I"), (rb"VP8|ANM", 4, "<IIIII")), ((rb"[JXrjBT]", 1, "<I"), (rb"[KqhUC]", 1, "<B"))
FORMATS = (
    Format(rb"\xff\xd8", JPEG, split_at(rb"\xff[\xc0-\xfe]"), pieces=lambda: PIECES["jpeg"]),
    Format(rb"\x89PNG", PNG, split_png, join_png, hostile.png_pieces),
    Format(rb"GIF8", GIF, split_at(rb"[!,;]"), pieces=lambda: PIECES["gif"]),
    Format(rb"BM", ((rb"\A", 2, "<IIIIIIHHIIIIII"),)),
    Format(rb"II\*\0", TIFF, split_at(ENTRY)),
    Format(rb"RIFF", WEBP, split_at(rb"VP8|ANIM|ANMF|EXIF"), pieces=lambda: PIECES["webp"]),
    Format(rb"PK", ZIP, split_zip, join_zip),
    Format(rb"\x1f\x8b", (), lambda data: [gzip.decompress(data)], lambda parts: gzip.compress(b"".join(parts), 1)),
    Format(rb".{257}ustar", TAR, split_tar, join_tar, lambda: hostile.TAR_PIECES, hostile.seal_tar),
    Format(rb".{12}\x0a.{1,3}\x0a", (), split_records, join_records, lambda: hostile.RECORDS),
    Format(rb"\x93NUMPY", ((rb"\A", 6, "<BBH"),), lambda data: [data[:128], data[128:]], pieces=lambda: PIECES["npy"]),
    Format(rb".{5}\0\0\0\{", ((rb"\A", 0, "<Q"),), split_tensors, join_tensors),
    Format(rb"\x80[\2-\5]", PICKLE, split_pickle, pieces=lambda: PIECES["pickle"]),
    Format(rb"PAR1", ((rb"....PAR1\Z", 0, "<I"),), split_at(rb"PAR1|\x15[\0-\x10]")),
    Format(rb"MATLAB", ((rb"\A", 124, "<HHIIII"),), split_at(rb"[\1-\x0f]\0\0\0")),
)
