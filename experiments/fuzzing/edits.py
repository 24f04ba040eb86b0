"""Edits of bytes and texts that know no format but JSON and TOML."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from fuzzing.case import Draw

T = TypeVar("T")
NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    300,
    512,
    4_000,
    16_384,
    32_768,
    60_000,
    65_535,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
)
NUMBERS = (*NUMBERS, (1 << 32) - 1, 1 << 33, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
RUNS = (1, 16, 256, 4096, 1 << 16, 1 << 20)


def expanded(entry: Any) -> Any:
    """Return the words of a dictionary as texts: "x*3" is "xxx", and an inner list is joined."""
    if isinstance(entry, dict):
        return {key: expanded(value) for key, value in entry.items()}
    if isinstance(entry, list):
        return tuple("".join(map(expanded, one)) if isinstance(one, list) else expanded(one) for one in entry)
    text, times = re.fullmatch(r"(.*?)(?:\*(\d+))?", entry, re.DOTALL).groups()  # type: ignore[union-attr]
    return text * int(times or 1)


WORDS: dict[str, Any] = expanded(tomllib.loads(Path(__file__).with_name("dictionary.toml").read_text(encoding="utf-8")))
"""Hostile words, by kind of text."""
LONG = (*WORDS["long"], "\ud800")
"""Texts that no name may be."""
TOKENS = tuple(word.encode() for word in WORDS["tokens"])
SCALARS = st.one_of(
    st.sampled_from((None, True, -1, 1 << 31, 1 << 63, 1 << 64, 10**30, 10**308, 5e-324, 1e308, *WORDS["long"])),
    *(st.integers(), st.floats(), st.text(max_size=8)),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
"""Values of any type."""


def pick(draw: Draw, values: Sequence[T]) -> T:
    """Draw one of the values. Cheaper than `sampled_from` for values with megabytes."""
    if not values:
        raise IndexError("nothing to draw from")
    return values[draw(st.integers(0, len(values) - 1))]


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


def json_edited(draw: Draw, data: bytes) -> bytes:
    """Return a JSON document with one to three other values, keys, or texts that no encoder writes."""
    tree, raws = [json.loads(data)], list[str]()
    for _ in range(draw(st.integers(1, 3))):
        _change(draw, tree, raws)
    text = ",".join(map(json.dumps, tree))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@{number}@"', raw)
    if pick(draw, (False,) * 9 + (True,)):
        text = pick(draw, ("\ufeff" + text, text + text, text + "\0", f"[{text}]", text[: len(text) // 2]))
    return text.encode("utf-8", "surrogatepass")


def _change(draw: Draw, tree: list[Any], raws: list[str]) -> None:
    places = _places(tree)
    if not places:
        return
    inside, key = pick(draw, places)
    value = inside[key]
    match pick(draw, ("near", "near", "near", "any", "any", "raw", "gone", "key", "more", "swap")):
        case "near":
            inside[key] = _near(draw, value)
        case "raw":
            raws.append(pick(draw, WORDS["json"]["raw"]))
            inside[key] = f"@{len(raws) - 1}@"
        case "gone":
            del inside[key]
        case "key" if isinstance(inside, dict):
            inside[pick(draw, (*LONG, str(key).upper()))] = inside.pop(key)
        case "more" if isinstance(inside, list):
            inside[key:key] = [value] * pick(draw, (1, 2, 1_000, 100_000))
        case "swap":
            there, other = pick(draw, places)
            if not isinstance(value, dict | list) and not isinstance(there[other], dict | list):
                inside[key], there[other] = there[other], value
        case _:
            inside[key] = draw(VALUES)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in `tree`."""
    found = [(tree, key) for key in (tree if isinstance(tree, dict) else range(len(tree)))]
    return found + [place for _, key in found if isinstance(tree[key], dict | list) for place in _places(tree[key])]


def _near(draw: Draw, value: Any) -> Any:
    """Return a similar value, mostly of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return pick(draw, (value + 1, value - 1, -value, 0, value * 2, value * 1_000_000, value // 2, str(value)))
    if isinstance(value, float):
        return pick(draw, (value * 2, -value, value * 1e200, value / 1e200, str(value)))
    if isinstance(value, str):
        place = draw(st.integers(0, len(value)))
        return pick(
            draw, (value[:place] + pick(draw, "\0,.:=-+/ x0*") + value[place:], value[:place], value.upper(), value * 3)
        )
    return value


def toml_edited(draw: Draw, data: bytes) -> bytes:
    """Return a TOML document with one to three changed lines."""
    lines = data.decode().split("\n")
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        key, equals, value = lines[place].partition("=")
        match pick(draw, ("value", "value", "value", "line", "twice", "gone", "key")):
            case "value" if equals:
                lines[place] = f"{key}= {pick(draw, WORDS['toml']['values'])}"
            case "key" if equals:
                lines[place] = pick(draw, (key[:-2], f"{key.strip()}x", f"{key.strip()}.x", key.upper())) + "=" + value
            case "twice":
                lines.insert(place, lines[place])
            case "gone":
                lines[place] = ""
            case _:
                lines.insert(place, pick(draw, WORDS["toml"]["lines"]))
    return "\n".join(lines).encode()


def line_edited(draw: Draw, data: bytes) -> bytes:
    """Return a text with an edited, repeated or other line."""
    lines = data.split(b"\n")
    place = draw(st.integers(0, len(lines) - 1))
    cells = [word for kind in ("numbers", "names", "labels") for word in WORDS["tar"][kind]]
    row = lines[place][:1] == b"{" and draw(st.booleans())
    other = pick(draw, (",", "\t", " ")).join(pick(draw, cells) for _ in range(draw(st.integers(0, 4)))).encode()
    lines[place] = json_edited(draw, lines[place]) if row else pick(draw, (bytes_edited(draw, lines[place]), other))
    lines[place:place] = [lines[place]] * min(pick(draw, (0, 0, 1, 3_000)), (1 << 21) // (1 + len(lines[place])))
    return pick(draw, (b"\n", b"\n", b"\r", b"\n\n")).join(lines)


def words(draw: Draw, kind: str) -> str:
    """Return a text of one to five words of a kind, or any text."""
    known = (*WORDS["words"][kind], *LONG) if pick(draw, (False, False, False, True)) else WORDS["words"][kind]
    return "".join(pick(draw, known) for _ in range(draw(st.integers(1, 5)))) or draw(st.text(max_size=40))
