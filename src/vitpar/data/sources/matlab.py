"""Reader of one table from a MATLAB file of version 5, such as the list of classes in ImageNet's development kit.

A table is an array of structs with one number or one line of text in every field. Other content is skipped without
parsing it, however deeply it is nested. The format is described in MathWorks' "MAT-File Format" (2024).
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

_HEADER = 128  # bytes before the first element
# Codes of element types, and numpy types of those that are arrays of numbers.
_COMPRESSED, _MATRIX, _UTF8, _UTF16 = 15, 14, 16, 17
_NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
# Codes of array classes.
_STRUCT, _CHARACTERS, _FIRST_NUMERIC, _LAST_NUMERIC = 2, 4, 6, 15

Cell = float | str
"""Content of a field."""


class _Element(NamedTuple):
    """Data element of a file."""

    kind: int
    """Code of the type."""
    data: memoryview
    """Content, without padding."""


class _Array(NamedTuple):
    """Array whose head was read."""

    kind: int
    """Code of the class."""
    size: int
    """Number of items."""
    name: str
    """Name of the variable."""
    rest: Iterator[_Element]
    """Elements after the head."""


def read_table(data: bytes, name: str, fields: tuple[str, ...]) -> list[Mapping[str, Cell]]:
    """Return the rows of a table, with the given fields of each.

    data: content of the file.
    name: name of the table.
    fields: names of the fields to return.

    Raises ValueError for another kind of file, a damaged one, a table or field that is missing, and a field that is
    neither a number nor a line of text.
    """
    if len(data) < _HEADER or data[124:128] != b"\x00\x01IM":
        raise ValueError("it is not a MATLAB 5 file")
    for element in _elements(memoryview(data)[_HEADER:]):
        kind, body = element
        if kind == _COMPRESSED:
            kind, body = _inflated(body)
        if kind != _MATRIX:
            continue
        array = _array(body)
        if array.name == name and array.kind == _STRUCT:
            return list(_rows(array, fields))
    raise ValueError(f"it has no table '{name}'")


def _elements(data: memoryview) -> Iterator[_Element]:
    """Yield the consecutive elements in `data`.

    An element is a type and a length of 4 bytes each, the content, and zeros up to a multiple of 8 bytes. A small
    element is a type and a length of 2 bytes each and up to 4 bytes of content.

    Raises ValueError.
    """
    place = 0
    while place < len(data):
        if place + 8 > len(data):
            raise ValueError("it ends within an element")
        kind, size = struct.unpack_from("<II", data, place)
        if kind >> 16:
            kind, size, begin, end = kind & 0xFFFF, kind >> 16, place + 4, place + 8
        else:
            begin = place + 8
            end = begin + size + (-size % 8 if kind != _COMPRESSED else 0)
        if begin + size > min(end, len(data)):
            raise ValueError("it ends within an element")
        yield _Element(kind, data[begin : begin + size])
        place = end


def _inflated(data: memoryview) -> _Element:
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(data)
    except zlib.error:
        raise ValueError("its compressed data is damaged") from None
    if not inflate.eof:
        raise ValueError("its compressed data is truncated")
    return _next(_elements(memoryview(content)))


def _array(data: memoryview) -> _Array:
    """Read the head of an array.

    Raises ValueError.
    """
    rest = _elements(data)
    flags, sizes, name = (_next(rest) for _ in range(3))
    shape = _numbers(sizes)
    if not len(flags.data) or len(shape) != 2 or (shape < 0).any():
        raise ValueError("an array has no class or is not two-dimensional")
    return _Array(flags.data[0], int(shape[0]) * int(shape[1]), bytes(name.data).decode("latin1"), rest)


def _rows(table: _Array, fields: tuple[str, ...]) -> Iterator[Mapping[str, Cell]]:
    width, names = _numbers(_next(table.rest)), bytes(_next(table.rest).data)
    if len(width) != 1 or not 0 < width[0] <= 64:
        raise ValueError("its field names have no length")
    step = int(width[0])
    known = [names[i : i + step].split(b"\0")[0].decode("latin1") for i in range(0, len(names), step)]
    missing = next((field for field in fields if known.count(field) != 1), None)
    if missing is not None:
        raise ValueError(f"its table has no field '{missing}'")
    for _ in range(table.size):
        row = {name: _next(table.rest) for name in known}
        yield {name: _cell(row[name]) for name in fields}


def _cell(element: _Element) -> Cell:
    if element.kind != _MATRIX:
        raise ValueError("a field is not an array")
    array = _array(element.data)
    content = next(array.rest, _Element(_UTF8, memoryview(b"")))
    if array.kind == _CHARACTERS:
        if content.kind in _NUMBERS:  # one number per character: Latin-1 or UTF-16 without surrogates
            return "".join(map(chr, _numbers(content).astype(np.uint16).tolist()))
        if content.kind in (_UTF8, _UTF16):
            return bytes(content.data).decode("utf-8" if content.kind == _UTF8 else "utf-16-le")
    if _FIRST_NUMERIC <= array.kind <= _LAST_NUMERIC:
        numbers = _numbers(content)
        if len(numbers) == array.size == 1:
            return float(numbers[0])
    raise ValueError("a field is neither a number nor a line of text")


def _numbers(element: _Element) -> np.ndarray:
    code = _NUMBERS.get(element.kind)
    if code is None or len(element.data) % np.dtype(code).itemsize:
        raise ValueError("an element is not numeric")
    return np.frombuffer(element.data, code)


def _next(elements: Iterator[_Element]) -> _Element:
    element = next(elements, None)
    if element is None:
        raise ValueError("it is truncated")
    return element
