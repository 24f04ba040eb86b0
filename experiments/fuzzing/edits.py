"""Strategy that edits the files of a case: cuts, other bytes, repeated parts and hostile words."""

import gzip
import re
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from helpers.hostile_files import seal_tar
from helpers.hostile_pieces import NUMBERS, PIECES, TEXTS

Files = dict[str, bytes]
"""Contents by path in the folder of the case."""
Draw = Callable[[st.SearchStrategy[Any]], Any]
SPANS = re.compile(rb'"[^"\n]*"|[\w./+-]+|\xff[\xc0-\xfe]|[\[{][^\[\]{}]*[\]}]|[^\n]+')
"""Parts of texts, and of binary files with names in them, that an edit replaces."""
WORDS = [word.encode("utf-8", "surrogatepass") for word in (*TEXTS, *map(str, NUMBERS))]
WORDS += [(number % (1 << 32)).to_bytes(4, order) for number in NUMBERS for order in ("little", "big")]
WORDS += [piece for pieces in PIECES.values() for piece in pieces]


class Case(dict[str, bytes]):
    """Files with edits, with a short description."""

    def __repr__(self) -> str:
        return ", ".join(f"{name}: {content[:200]!r}" for name, content in self.items())[:2_000]


def pick(draw: Draw, values: Any) -> Any:
    """Draw one of the values. Cheaper than `sampled_from` for long values."""
    return values[draw(st.integers(0, len(values) - 1))]


@st.composite
def edited(draw: Draw, seeds: list[Files]) -> Case:
    """Return a seed with one to three edits."""
    case = Case(pick(draw, seeds))
    for _ in range(draw(st.integers(1, 3))):
        name = pick(draw, sorted(case))
        case[name] = edit(draw, case[name])
    return case


def edit(draw: Draw, data: bytes) -> bytes:
    """Replace a part of a file by another one. Compressed files are edited inside in half of the cases."""
    if data[:2] == b"\x1f\x8b" and draw(st.booleans()):
        with suppress(OSError, EOFError, zlib.error):  # an earlier edit broke it
            return gzip.compress(edit(draw, gzip.decompress(data)), 1, mtime=0)
    spans = [match.span() for match in SPANS.finditer(data[: 1 << 20])] if draw(st.booleans()) else []
    begin, other = draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))
    begin, end = pick(draw, spans or [(begin, begin + size) for size in (0, 0, 1, 2, 4, 8, 512, len(data))])
    repeated = data[begin:end] * pick(draw, (2, 2 + (1 << 20) // (end - begin + 1)))
    moved = data[slice(*pick(draw, spans or [(other, other + 512)]))]
    new = pick(draw, (b"", draw(st.binary(max_size=8)), repeated, moved, pick(draw, WORDS), pick(draw, WORDS)))
    changed = data[:begin] + new + data[end:]
    return seal_tar(changed) if b"ustar" in changed and draw(st.booleans()) else changed
