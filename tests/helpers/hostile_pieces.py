"""Hostile words and parts of files, from the tables in helpers/hostile."""

import re
import tomllib
from pathlib import Path
from typing import Any

from helpers.hostile_files import header, pax, seal_tar, tar_member, tar_size

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 300, 512, 4_000, 16_384, 32_768, 60_000, 65_535, 1 << 20, (1 << 31) - 1)
NUMBERS = (*NUMBERS, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SIZES = (-(1 << 40), -512, -1, 513, *NUMBERS[-10:], 1 << 80)


def expanded(entry: Any) -> Any:
    """Return the words of a table as texts: "x*3" is "xxx", and an inner list is joined."""
    if isinstance(entry, dict):
        return {key: expanded(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return tuple("".join(map(expanded, one)) if isinstance(one, list) else expanded(one) for one in entry)
    text, times = re.fullmatch(r"(.*?)(?:\*(\d+))?", entry, re.DOTALL).groups()  # type: ignore[union-attr]
    return text * int(times or 1)


def pairs(*words: str) -> list[str]:
    """Return the words, and each short one followed by each of the others that is short."""
    short = [word for word in words if len(word) < 100]
    return [*words, *(one + other for one in short for other in short)]


def _read(name: str) -> dict[str, Any]:
    path = Path(__file__).with_name("hostile") / name
    read: dict[str, Any] = expanded(tomllib.loads(path.read_text(encoding="utf-8")))
    return read


WORDS = _read("words.toml")
"""Hostile words, by kind of text."""
LONG = (*WORDS["long"], "\ud800")
"""Texts that no name may be."""
TEXTS = (*LONG, *WORDS["tokens"], *WORDS["json"]["raw"], *WORDS["toml"]["values"], *WORDS["toml"]["lines"])
TEXTS = (*TEXTS, *(word for words in (*WORDS["tar"].values(), *WORDS["words"].values()) for word in words))
"""Hostile words for any file."""
PIECES = {kind: tuple(piece.encode("latin-1") for piece in pieces) for kind, pieces in _read("pieces.toml").items()}
"""Hostile parts by format."""
PICKLES = (*(b"\x80\x02" + part + b"." for part in PIECES["pickle"]), *(b"%c." % code for code in b"N(021asbRQ"), b"")
"""Complete hostile pickles."""

_TAR = {kind: tuple(word.encode() for word in words) for kind, words in WORDS["tar"].items()}
_LINK = tar_member("././@LongLink", b"0000.png\0", b"L")
TAR_MEMBERS = (
    *(_LINK * 5_000, pax(b"mtime=1") * 5_000, pax(b"mtime=1", b"g") * 400, bytes(1024) + _LINK),
    *(pax(b"size=%s" % size, kind) for size in (*_TAR["numbers"], *map(b"%d".__mod__, SIZES)) for kind in (b"x", b"g")),
    *(pax(b"path=" + name) for name in _TAR["names"]),
    *(pax(b"GNU.sparse." + record) for record in (b"map=0,1099511627776", b"realsize=1099511627776", b"major=x")),
    *(tar_member("pax", line, kind) for line in _TAR["pax"] for kind in (b"x", b"g")),
    *(tar_member("././@LongLink", b"", kind, size) for size in SIZES for kind in (b"L", b"K", b"x", b"g", b"0")),
    *(tar_member("././@LongLink", name + b"\0", b"L") for name in _TAR["names"]),
    seal_tar(header("0.png", b"S", 512)[:386] + (tar_size(1 << 40) * 8 + b"\1" + tar_size(1 << 40)).ljust(126, b"\0"))
    + bytes(512),
    *(tar_member(f"0000.{kind}", label) for label in _TAR["labels"] for kind in ("cls", "json")),
    *(tar_member("0000.json", b'{"label": %s}' % label) for label in _TAR["labels"]),
    *(tar_member("0000.png", image) for image in (b"", b"GIF89a", PIECES["disguise"][0], b"\xff" * 1000)),
    *(bytes(512), bytes(1024), bytes(2 << 20), b"x", b"\xff" * 10_240),
)
"""Hostile members of a tar file."""
