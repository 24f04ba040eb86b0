"""ImageNet as TFRecords: `train-00000-of-01024`, with `image/encoded` and `image/class/label` in every record.

A record is a length, the checksum of the length, a protocol buffer (tensorflow.Example) and its checksum. Opening a
file parses only the parts of the buffer that lead to the label and to the image's place, so it does not read the
images. The checksum of a record is compared when its image is read.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitpar.data.sources.source import Names, Source, SourceSplit, by_split, numbered, read_span, reading
from vitpar.errors import DataError
from vitpar.io import decode_utf8, open_regular
from vitpar.text import shown

NAME = re.compile(r".*-\d+-of-\d+(\.tfrecords?)?|.*\.tfrecords?")
"""Pattern of the names of TFRecord files."""
_HEADER, _FOOTER = 12, 4  # bytes before and after the protocol buffer of a record
_IMAGE, _LABEL, _NAME = b"image/encoded", b"image/class/label", b"image/class/synset"


@dataclass(frozen=True, slots=True)
class _Record:
    """Place and label of an image in a TFRecord file."""

    begin: int
    """Byte offset of the protocol buffer in the file."""
    length: int
    """Bytes of the protocol buffer."""
    image: slice
    """Bytes of the encoded image within the protocol buffer."""
    label: int
    """Label as stored."""
    name: str | None
    """Name of the class; None if the record does not have it."""


def tfrecords(folder: Path) -> Source:
    """Return the source in `folder`.

    Labels that begin at 1, because 0 stands for the background, are shifted to begin at 0.

    Raises DataError, also if google-crc32c is not installed.
    """
    _masked_crc(b"")  # fails early if its library is missing
    paths = by_split((path for path in folder.iterdir() if NAME.fullmatch(path.name)), folder)
    splits = {split: [(path, record) for path in files for record in _records(path)] for split, files in paths.items()}
    empty = next((split for split, records in splits.items() if not records), None)
    if empty is not None:
        raise DataError(f"the TFRecords of '{empty}' in '{folder}' hold no images: remove them or fetch them again")
    names = dict[int, str | None]()
    for path, record in (one for records in splits.values() for one in records):
        if names.setdefault(record.label, record.name) != record.name:
            both = " and ".join(f"'{shown(name)}'" for name in (names[record.label], record.name))
            raise DataError(f"label {record.label} has the names {both} in '{path}': correct the records")
    first = 1 if min(names) == 1 else 0
    classes = numbered([label - first for label in names])
    for label, name in names.items():
        classes[label - first] = classes[label - first] if name is None else name
    return Source(classes, {split: _split(records, first) for split, records in splits.items()})


def _split(records: list[tuple[Path, _Record]], first: int) -> SourceSplit:
    def read(i: int) -> bytes:
        path, record = records[i]
        data = read_span(path, record.begin, record.length + _FOOTER)
        if _masked_crc(data[:-_FOOTER]) != int.from_bytes(data[-_FOOTER:], "little"):
            raise DataError(f"the record at byte {record.begin - _HEADER} of '{path}' is damaged: fetch it again")
        return data[record.image]

    names = Names(len(records), lambda i: f"{records[i][0]}/byte {records[i][1].begin - _HEADER}")
    return SourceSplit(names, np.array([record.label - first for _, record in records], np.int32), read)


def _records(path: Path) -> Iterator[_Record]:
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield from _parsed(path, data, size)


def _parsed(path: Path, data: mmap.mmap, size: int) -> Iterator[_Record]:
    begin = 0
    while begin < size:
        header = data[begin : begin + _HEADER]
        if len(header) < _HEADER or _masked_crc(header[:8]) != int.from_bytes(header[8:], "little"):
            raise DataError(
                f"the record at byte {begin} of '{path}' is damaged, or it is not a TFRecord file: fetch it"
            )
        length = int.from_bytes(header[:8], "little")
        end = begin + _HEADER + length
        if end + _FOOTER > size:
            raise DataError(f"'{path}' ends within the record at byte {begin}: fetch it again")
        try:
            yield _example(data, begin + _HEADER, end)
        except (ValueError, IndexError) as error:
            raise DataError(f"the record at byte {begin} of '{path}' cannot be used: {shown(error)}") from None
        begin = end + _FOOTER


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


def _example(data: mmap.mmap, begin: int, end: int) -> _Record:
    spans: dict[bytes, tuple[int, int]] = {}
    for _, features in _fields(data, begin, end, 1):
        for _, entry in _fields(data, *features, 1):
            parts = dict(_fields(data, *entry, 1, 2))
            if 1 in parts and 2 in parts:
                spans[data[slice(*parts[1])]] = parts[2]
    missing = next((name for name in (_IMAGE, _LABEL) if name not in spans), None)
    if missing is not None:
        raise ValueError(f"it has no feature '{missing.decode()}'")
    image = _first_text(data, *spans[_IMAGE])
    if image is None or image[0] == image[1]:
        raise ValueError("its image is empty")
    inside = slice(image[0] - begin, image[1] - begin)
    named = _first_text(data, *spans[_NAME]) if _NAME in spans else None
    name = None if named is None else decode_utf8(data[slice(*named)]).strip()
    return _Record(begin, end - begin, inside, _integer(data, *spans[_LABEL]), name)


def _first_text(data: mmap.mmap, begin: int, end: int) -> tuple[int, int] | None:
    """Return the begin and end of the first item of a bytes_list; None if it is empty."""
    return next((span for _, texts in _fields(data, begin, end, 1) for _, span in _fields(data, *texts, 1)), None)


def _integer(data: mmap.mmap, begin: int, end: int) -> int:
    """Return the only number of an int64_list, packed or not.

    Raises ValueError.
    """
    for _, numbers in _fields(data, begin, end, 3):
        for _, (first, last) in _fields(data, *numbers, 1, varints=True):
            value, stop = _varint(data, first, last)
            if stop == last:
                return value
    raise ValueError("its label is not a single integer")


def _fields(
    data: mmap.mmap, begin: int, end: int, *wanted: int, varints: bool = False
) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (field number, (begin, end) of the content) for fields of a protocol buffer message.

    wanted: numbers of the fields to yield.
    varints: whether to yield varint fields too, in addition to length-delimited ones.

    Raises ValueError.
    """
    while begin < end:
        tag, begin = _varint(data, begin, end)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            first = begin
            _, begin = _varint(data, begin, end)
        elif kind == 2:
            length, first = _varint(data, begin, end)
            begin = first + length
        elif kind in (1, 5):
            first, begin = begin, begin + (8 if kind == 1 else 4)
        else:
            raise ValueError("it is not a tensorflow.Example")
        if begin > end:
            raise ValueError("one of its fields is longer than the record")
        if number in wanted and (kind == 2 or (varints and kind == 0)):
            yield number, (first, begin)


def _varint(data: mmap.mmap, begin: int, end: int) -> tuple[int, int]:
    """Return a varint, which has seven bits per byte, and the offset of its end.

    Raises ValueError.
    """
    value = 0
    for place in range(begin, min(end, begin + 10)):
        value |= (data[place] & 0x7F) << (7 * (place - begin))
        if data[place] < 0x80:
            return value, place + 1
    raise ValueError("one of its numbers does not end")
