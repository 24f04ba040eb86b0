"""ImageNet as TFRecords: `train-00000-of-01024`, with `image/encoded` and `image/class/label` in every record.

A record is a length, the checksum of the length, a protocol buffer (tensorflow.Example) and its checksum. Opening a
file finds only the label and the image's place in the buffer, so it does not read the images. The checksum of a record
is compared when its image is read.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitpar.data.sources.source import Source, SourceSplit, by_split, numbered, read_span, reading
from vitpar.errors import DataError
from vitpar.io import decode_utf8, open_regular
from vitpar.text import shown

NAME = re.compile(r".*-\d+-of-\d+(\.tfrecords?)?|.*\.tfrecords?")
"""Pattern of the names of TFRecord files."""
_HEADER, _FOOTER = 12, 4  # bytes before and after the protocol buffer of a record
_IMAGE, _LABEL, _NAME = b"image/encoded", b"image/class/label", b"image/class/synset"


_Record = tuple[Path, slice, slice, int, str | None]
"""The file, the bytes of the protocol buffer and of the image in it, the label as stored, and the name of its class."""


def tfrecords(folder: Path) -> Source:
    """Return the source in `folder`.

    Labels that begin at 1, because 0 stands for the background, are shifted to begin at 0.

    Raises DataError, also if google-crc32c is not installed.
    """
    paths = by_split((path for path in folder.iterdir() if NAME.fullmatch(path.name)), folder)
    splits = {split: [record for path in files for record in _records(path)] for split, files in paths.items()}
    empty = next((split for split, records in splits.items() if not records), None)
    if empty is not None:
        raise DataError(f"the TFRecords of '{empty}' in '{folder}' hold no images: remove them or fetch them again")
    names = dict[int, str | None]()
    for path, _, _, label, name in (record for records in splits.values() for record in records):
        if names.setdefault(label, name) != name:
            both = " and ".join(f"'{shown(one)}'" for one in (names[label], name))
            raise DataError(f"label {label} has the names {both} in '{path}': correct the records")
    first = 1 if min(names) == 1 else 0
    classes = numbered([label - first for label in names])
    for label, name in names.items():
        classes[label - first] = classes[label - first] if name is None else name
    return Source(classes, {split: _split(records, first) for split, records in splits.items()})


def _split(records: list[_Record], first: int) -> SourceSplit:
    def name(i: int) -> str:
        path, example, *_ = records[i]
        return f"{path}/byte {example.start - _HEADER}"

    def read(i: int) -> bytes:
        path, example, image, *_ = records[i]
        data = read_span(path, example.start, example.stop - example.start + _FOOTER)
        if _masked_crc(data[:-_FOOTER]) != int.from_bytes(data[-_FOOTER:], "little"):
            raise DataError(f"the record '{name(i)}' is damaged: fetch it again")
        return data[image.start - example.start : image.stop - example.start]

    return SourceSplit(name, np.array([label - first for *_, label, _ in records], np.int32), read)


def _records(path: Path) -> Iterator[_Record]:
    with reading(path), open_regular(path) as file:
        if not path.stat().st_size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            begin = 0
            while begin < len(data):
                header = data[begin : begin + _HEADER]
                example = slice(begin + _HEADER, begin + _HEADER + int.from_bytes(header[:8], "little"))
                whole = len(header) == _HEADER and _masked_crc(header[:8]) == int.from_bytes(header[8:], "little")
                if not whole or example.stop + _FOOTER > len(data):
                    raise DataError(f"'{path}' is no TFRecord file, or damaged or cut at byte {begin}: fetch it again")
                try:
                    yield _record(path, data, example)
                except (ValueError, IndexError, TypeError, AttributeError) as error:
                    raise DataError(f"the record at byte {begin} of '{path}' cannot be used: {shown(error)}") from None
                begin = example.stop + _FOOTER


def _masked_crc(data: bytes) -> int:
    """Return the checksum of `data` as TFRecords store it: CRC-32C, rotated and added to a constant.

    Raises DataError if google-crc32c is not installed.
    """
    try:
        import google_crc32c
    except ImportError:
        raise DataError("TFRecords need google-crc32c: pip install -e '.[tfrecord]'") from None
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _record(path: Path, data: mmap.mmap, example: slice) -> _Record:
    """Parse a tensorflow.Example: a list of features, each of them a name and a list of one type of values.

    Raises ValueError, IndexError, TypeError and AttributeError for a buffer of another kind.
    """
    values = dict[bytes, Any]()
    for features in _fields(data, example, 1):
        for feature in _fields(data, features, 1):
            (name,), (kinds,) = _fields(data, feature, 1), _fields(data, feature, 2)
            if (key := data[name]) in (_IMAGE, _LABEL, _NAME):
                # A list of bytes is field 1 of its feature, and one of integers, which may be packed, is field 3.
                lists = _fields(data, kinds, 3 if key == _LABEL else 1)
                values[key] = next((value for one in lists for value in _fields(data, one, 1)), None)
    if (missing := next((name for name in (_IMAGE, _LABEL) if values.get(name) is None), None)) is not None:
        raise ValueError(f"it has no feature '{missing.decode()}'")
    image, label, name = values[_IMAGE], values[_LABEL], values.get(_NAME)
    if isinstance(label, slice):
        label, end = _varint(data, label.start)
        if end != values[_LABEL].stop:
            raise ValueError("its label is not a single integer")
    if image.start == image.stop:
        raise ValueError("its image is empty")
    return path, example, image, label, name and decode_utf8(data[name]).strip()


def _fields(data: mmap.mmap, message: slice, wanted: int) -> list[Any]:
    """Return the contents of a field of a protocol buffer message, in order: integers, and the places of bytes.

    Raises ValueError and IndexError.
    """
    found, begin = list[Any](), message.start
    while begin < message.stop:
        tag, begin = _varint(data, begin)
        content: int | slice | None = None
        if tag & 7 == 0:
            content, begin = _varint(data, begin)
        elif tag & 7 == 2:
            length, begin = _varint(data, begin)
            content, begin = slice(begin, begin + length), begin + length
        elif tag & 7 in (1, 5):
            begin += 8 if tag & 7 == 1 else 4
        else:
            raise ValueError("it is not a tensorflow.Example")
        if begin > message.stop:
            raise ValueError("one of its fields is longer than the record")
        if tag >> 3 == wanted:
            found.append(content)
    return found


def _varint(data: mmap.mmap, begin: int) -> tuple[int, int]:
    """Return a varint, which has seven bits per byte, and the offset of its end. Raises ValueError and IndexError."""
    value = 0
    for place in range(begin, begin + 10):
        value |= (data[place] & 0x7F) << (7 * (place - begin))
        if data[place] < 0x80:
            return value, place + 1
    raise ValueError("one of its numbers does not end")
