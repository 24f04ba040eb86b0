"""Hostile words and parts of files, from the tables in helpers/hostile."""

import re
import tomllib
from pathlib import Path
from typing import Any

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 300, 512, 4_000, 16_384, 32_768, 60_000, 65_535, 1 << 20, (1 << 31) - 1)
NUMBERS = (*NUMBERS, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def expanded(entry: Any) -> Any:
    """Return the words of a table as texts: "x*3" is "xxx", and an inner list is joined."""
    if isinstance(entry, dict):
        return {key: expanded(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return tuple("".join(map(expanded, one)) if isinstance(one, list) else expanded(one) for one in entry)
    text, times = re.fullmatch(r"(.*?)(?:\*(\d+))?", entry, re.DOTALL).groups()  # type: ignore[union-attr]
    return text * int(times or 1)


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
