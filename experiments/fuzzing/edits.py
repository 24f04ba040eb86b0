"""Strategies for edits of files: of words and lines of texts, and of parts of binary formats, with right checksums."""

import gzip
import io
import json
import pickletools
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st

from fuzzing.hostile import (
    LONG,
    NUMBERS,
    PIECES,
    RECORDS,
    TAR_FIELDS,
    TAR_PIECES,
    TAR_TEXTS,
    TEXTS,
    TOKENS,
    WORDS,
    png_chunk,
    png_pieces,
)
from helpers.hostile_files import seal_tar
from helpers.tfrecord_files import record

T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[Any]], Any]
"""Function of hypothesis that draws a value from a strategy."""
Parts = list[bytes]
RUNS = (1, 16, 256, 4096, 1 << 16, 1 << 20)
MOST_REPEATED = 1 << 21
"""Most bytes that repeating a part adds."""
BROKEN = (
    *(ValueError, IndexError, OverflowError, OSError, EOFError, RuntimeError),
    *(struct.error, zlib.error, zipfile.BadZipFile),
)
"""Errors of editing what an earlier edit broke: a structure that cannot be split, a number that no float can hold."""
SCALARS = st.one_of(
    st.sampled_from((None, True, -1, 1 << 31, 1 << 63, 1 << 64, 10**30, 10**308, 5e-324, 1e308, *LONG[:-1])),
    *(st.integers(), st.floats(), st.text(max_size=8)),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
"""Values of any type."""
SPANS = (
    rb'"(?:[^"\\\n]|\\.)*"|[^\s\[\]{}",:=]+',  # quoted texts, words and numbers
    rb'"(?:[^"\\\n]|\\.)*"|[^\s\[\]{}",:=]+',
    rb"[\[{][^\[\]{}]*[\]}]",  # innermost lists and objects
    rb"[^\n]+",
)
"""Patterns of the spans that an edit of a text replaces."""


def pick(draw: Draw, values: Sequence[T]) -> T:
    """Draw one of the values. Cheaper than `sampled_from` for values with megabytes."""
    if not values:
        raise IndexError("nothing to draw from")
    return values[draw(st.integers(0, len(values) - 1))]


def words(draw: Draw, kind: str) -> str:
    """Return a text of one to five words of a kind, or any text."""
    known = (*WORDS["words"][kind], *LONG) if pick(draw, (False, False, False, True)) else WORDS["words"][kind]
    return "".join(pick(draw, known) for _ in range(draw(st.integers(1, 5)))) or draw(st.text(max_size=40))


def bytes_edited(draw: Draw, data: bytes) -> bytes:
    """Replace a few bytes anywhere, in half of the cases among the first or last 64."""
    near = pick(draw, (len(data), len(data), 64, -64))
    place = draw(st.integers(0, min(len(data), near))) if near > 0 else max(0, len(data) + draw(st.integers(near, 0)))
    match draw(st.integers(0, 6)):
        case 0:
            new = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[place : place + 1])
        case 1:
            width = pick(draw, (1, 2, 4, 8))
            new = (pick(draw, NUMBERS) % (1 << 8 * width)).to_bytes(width, pick(draw, ("little", "big")))
        case 2:
            new = pick(draw, TOKENS)
        case 3:
            new = draw(st.binary(min_size=1, max_size=8))
        case 4:
            begin = draw(st.integers(0, len(data)))
            new = data[begin : begin + pick(draw, RUNS)]
        case 5:
            new = bytes([pick(draw, b"\0\xff 09A[{\x80")]) * pick(draw, RUNS)
        case _:
            new = b""
    return data[:place] + new + data[place + pick(draw, (len(new), len(new), 0, 1, 2, 512, 4096, len(data))) :]


def text_edited(draw: Draw, data: bytes) -> bytes:
    """Replace, repeat or remove a word, a list, an object or a line."""
    spans = [match.span() for match in re.finditer(pick(draw, SPANS), data)]
    begin, end = pick(draw, spans)
    old = data[begin:end]
    match pick(draw, ("near", "near", "near", "hostile", "hostile", "value", "other", "gone", "more")):
        case "near":
            new = _near(draw, old)
        case "hostile":
            new = pick(draw, TEXTS).encode("utf-8", "surrogatepass")
        case "value":
            new = json.dumps(draw(VALUES)).encode()
        case "other":
            new = data[slice(*pick(draw, spans))]
        case "gone":
            new = b""
        case _:
            between = pick(draw, (b",", b"\n", b""))
            new = between.join([old] * min(pick(draw, (2, 3, 1_000, 100_000)), MOST_REPEATED // len(old) + 2))
    return data[:begin] + new + data[end:]


def _near(draw: Draw, old: bytes) -> bytes:
    """Return a similar number or text."""
    try:
        value = json.loads(old)
    except ValueError:
        value = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        by = pick(draw, (value + 1, value - 1, -value, 0, value * 2, value * 1_000_000, value // 2, value * 1e200))
        return json.dumps(pick(draw, (by, by, by, str(by)))).encode()
    place = draw(st.integers(1, max(1, len(old) - 1)))
    more = b"%c" % pick(draw, b"\0,.:=-+/ x0*")
    return pick(
        draw, (old[:place] + more + old[place:], old[:1] + old[place:], old.upper(), old[:place] * 3 + old[place:])
    )


class Format(NamedTuple):
    """Structure of a binary format."""

    begin: bytes
    """Regular expression of its first bytes."""
    split: Callable[[bytes], Parts]
    """Function that splits a valid file into parts."""
    join: Callable[[Parts], bytes] = b"".join
    """Function that makes a file of parts, with right lengths and checksums."""
    pieces: Callable[[], tuple[bytes, ...]] = lambda: ()
    """Hostile parts; they replace a part or come before one, with all that is wrong in them."""
    edit: Callable[[Draw, bytes], bytes] = bytes_edited
    """Function that edits a part of no other format."""


def edited(draw: Draw, data: bytes) -> tuple[bytes, bool]:
    """Return a file with one to three edits, and whether its checksums are right afterwards."""
    sealed = False
    for _ in range(draw(st.integers(1, 3))):
        try:
            data, known = _once(draw, data)
            sealed |= known
        except BROKEN:
            data = bytes_edited(draw, data)
    return data, sealed


def _once(draw: Draw, data: bytes) -> tuple[bytes, bool]:
    form = next((form for form in FORMATS if re.match(form.begin, data, re.DOTALL)), None)
    if form is None and b"\0" not in data and draw(st.integers(0, 3)):
        return text_edited(draw, data), False
    if form is None or pick(draw, (False, False, True)):
        return bytes_edited(draw, data), False
    parts, pieces = form.split(data), form.pieces()
    place = pick(draw, range(len(parts)))
    match pick(draw, ("piece", "piece", "edit", "edit", "edit", "repeat", "move")):
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
            inner = parts[place] != data and draw(st.booleans())
            parts[place] = _once(draw, parts[place])[0] if inner else form.edit(draw, parts[place])
    return form.join(parts), True


def tar_edited(draw: Draw, block: bytes) -> bytes:
    """Overwrite a field of a tar file's header."""
    place, width = pick(draw, TAR_FIELDS)
    text = pick(draw, TAR_TEXTS)[:width].ljust(width, pick(draw, (b"\0", b" ")))
    return block[:place] + text + block[place + width :]


def split_at(pattern: bytes) -> Callable[[bytes], Parts]:
    """Return the function that splits data where the pattern begins."""
    return lambda data: re.split(b"(?s)(?=" + pattern + b")", data)


def join_png(parts: Parts) -> bytes:
    """Return a PNG, or chunks of one."""
    return b"".join(part if part[:4] == b"\x89PNG" else png_chunk(part[:4], part[4:]) for part in parts)


def split_png(data: bytes) -> Parts:
    """Return the signature, and kind and content of each chunk."""
    parts, place = [data[:8]], 8
    while place + 12 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        parts.append(data[place + 4 : place + 8 + size])
        place += size + 12
    return parts


def join_tar(blocks: Parts) -> bytes:
    """Return a tar file of padded blocks, with right checksums of headers."""
    return seal_tar(b"".join(block + bytes(-len(block) % 512) for block in blocks))


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


FORMATS = (
    Format(rb"\xff\xd8", split_at(rb"\xff[\xc0-\xfe]"), pieces=lambda: PIECES["jpeg"]),
    Format(rb"\x89PNG", split_png, join_png, png_pieces),
    Format(rb"GIF8", split_at(rb"[!,;]"), pieces=lambda: PIECES["gif"]),
    Format(rb"II\*\0", split_at(rb"[\0-\x53]\x01[\1-\5]\0.\0\0\0")),
    Format(rb"RIFF", split_at(rb"VP8|ANIM|ANMF|EXIF"), pieces=lambda: PIECES["webp"]),
    Format(rb"PK", split_zip, join_zip),
    Format(rb"\x1f\x8b", lambda data: [gzip.decompress(data)], lambda parts: gzip.compress(b"".join(parts), 1)),
    Format(rb".{257}ustar", lambda data: re.findall(rb"(?s).{512}", data), join_tar, lambda: TAR_PIECES, tar_edited),
    Format(rb".{12}\x0a.{1,3}\x0a", split_records, join_records, lambda: RECORDS),
    Format(rb"\x93NUMPY", lambda data: [data[:128], data[128:]], pieces=lambda: PIECES["npy"]),
    Format(rb".{5}\0\0\0\{", split_tensors, join_tensors),
    Format(rb"\x80[\2-\5]", split_pickle, pieces=lambda: PIECES["pickle"]),
    Format(rb"PAR1", split_at(rb"PAR1|\x15[\0-\x10]")),
    Format(rb"MATLAB", split_at(rb"[\1-\x0f]\0\0\0")),
)
