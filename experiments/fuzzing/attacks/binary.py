"""Edits of bytes that know only the tokens of a format."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

NUMBERS = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
LONGEST_RUN = 1 << 20


def small(
    draw: random.Random, data: bytes, others: Sequence[bytes] = (), tokens: Sequence[bytes] = ()
) -> tuple[bytes, str]:
    """Make one to three edits of a few bytes; return the bytes and a description."""
    edits = (_flip, _flip, _number, _number, _nudge, _drop, *((_token, _token, _token) if tokens else (_insert,)))
    return _edited(draw, data, [draw.choice(edits) for _ in range(draw.randint(1, 3))], others, tokens)


def rough(
    draw: random.Random, data: bytes, others: Sequence[bytes] = (), tokens: Sequence[bytes] = ()
) -> tuple[bytes, str]:
    """Make one to four edits of any size; return the bytes and a description.

    others: other files, parts of which may be spliced in.
    """
    edits = (_truncate, _truncate, _extend, _double, _swap, _cut, _run, _splice, _noise, _flip, _number, _token)
    return _edited(draw, data, [draw.choice(edits) for _ in range(draw.randint(1, 4))], others, tokens)


Edit = Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None]


def _edited(
    draw: random.Random, data: bytes, edits: Sequence[Edit], others: Sequence[bytes], tokens: Sequence[bytes]
) -> tuple[bytes, str]:
    changed = bytearray(data)
    for edit in edits:
        edit(draw, changed, others, tokens)
    return bytes(changed), ", ".join(edit.__name__.strip("_") for edit in edits)


def _place(draw: random.Random, data: bytearray) -> int:
    """Return the index of a byte, in half of the cases one of the first 128, where headers are."""
    most = len(data) if draw.random() < 0.5 else min(len(data), 128)
    return draw.randrange(most) if most else 0


def _span(draw: random.Random, data: bytearray) -> slice:
    begin = _place(draw, data)
    length = draw.choice((1, 2, 4, 8, 16, 64, 512, 4096, max(1, len(data) // 4)))
    return slice(begin, min(len(data), begin + draw.randint(1, length)))


def _flip(draw: random.Random, data: bytearray, *_: object) -> None:
    if data:
        data[_place(draw, data)] ^= 1 << draw.randrange(8)


def _number(draw: random.Random, data: bytearray, *_: object) -> None:
    width = draw.choice((1, 2, 4, 8))
    value = (draw.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, draw.choice(("little", "big")))
    begin = _place(draw, data)
    data[begin : begin + width] = value


def _nudge(draw: random.Random, data: bytearray, *_: object) -> None:
    if data:
        place = _place(draw, data)
        data[place] = (data[place] + draw.choice((-16, -1, 1, 16))) % 256


def _drop(draw: random.Random, data: bytearray, *_: object) -> None:
    begin = _place(draw, data)
    del data[begin : begin + draw.choice((1, 1, 2, 4))]


def _insert(draw: random.Random, data: bytearray, *_: object) -> None:
    begin = _place(draw, data)
    data[begin:begin] = draw.randbytes(draw.choice((1, 1, 2, 4, 8)))


def _token(draw: random.Random, data: bytearray, others: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    if not tokens:
        return _insert(draw, data)
    begin, token = _place(draw, data), draw.choice(tokens)
    data[begin : begin + draw.choice((0, 0, len(token)))] = token


def _truncate(draw: random.Random, data: bytearray, *_: object) -> None:
    del data[draw.randint(0, len(data)) :]


def _extend(draw: random.Random, data: bytearray, *_: object) -> None:
    data += draw.choice((bytes, draw.randbytes))(draw.choice((1, 16, 512, 10_240)))


def _double(draw: random.Random, data: bytearray, *_: object) -> None:
    span = _span(draw, data)
    data[span.stop : span.stop] = data[span] * draw.choice((1, 1, 2, 50))


def _swap(draw: random.Random, data: bytearray, *_: object) -> None:
    one, other = _span(draw, data), _span(draw, data)
    data[one], data[other] = data[other], data[one]


def _cut(draw: random.Random, data: bytearray, *_: object) -> None:
    del data[_span(draw, data)]


def _run(draw: random.Random, data: bytearray, *_: object) -> None:
    begin = _place(draw, data)
    length = draw.choice((256, 4096, 1 << 16, LONGEST_RUN))
    data[begin:begin] = bytes([draw.choice((0, 0xFF, 0x20, 0x30, 0x39, 0x41, 0x5B, 0x7B, 0x80))]) * length


def _splice(draw: random.Random, data: bytearray, others: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    if others:
        other = draw.choice(others)
        data[_place(draw, data) :] = other[draw.randint(0, len(other)) :]


def _noise(draw: random.Random, data: bytearray, *_: object) -> None:
    span = _span(draw, data)
    data[span] = draw.randbytes(span.stop - span.start)
