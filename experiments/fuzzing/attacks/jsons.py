"""Mutations of JSON: unexpected values, duplicate keys, invalid syntax, very large or deeply nested values."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

LEAVES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        7,
        1 << 31,
        -(1 << 31),
        1 << 63,
        1 << 64,
        10**30,
        10**308,
        -0.0,
        0.5,
        1e308,
        5e-324,
    ),
    *(
        "",
        "x",
        "1",
        "\0",
        "\x1b[31m",
        "\u202e",
        "a" * 300,
        "a" * 5_000,
        "../../x",
        "/etc/passwd",
        "{}",
        "%s%n",
        "0x7fff",
    ),
    *([], {}, [[]], [0] * 10, {"": ""}, [None], "None", "nan", ["x"] * 300),
)
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "1" * 4_000,
    "1" * 5_000,
    "01",
    "0x10",
    "1_000",
    "'a'",
    "tru",
    "-",
)
RAW = (
    *RAW,
    '"\\ud800"',
    '"\\udfff\\ud800"',
    '"\\u0000"',
    '"\\x"',
    "{",
    "[",
    "[1,]",
    "/**/1",
    "1e-400",
    "1.7976931348623159e308",
)
BOMBS = ("[" * 990 + "]" * 990, "[" * 100_000, '{"a":' * 100_000, "[" * 500_000 + "]" * 500_000)
BOMBS = (
    *BOMBS,
    '"' + "x" * 3_000_000 + '"',
    "[" + "0," * 500_000 + "0]",
    "{" + ",".join(f'"{i}":0' for i in range(100_000)) + "}",
)
JSON_BOMBS = tuple(bomb.encode() for bomb in BOMBS)
_MARK = "@raw {} raw@"


def json_attack(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Make one to three changes to a JSON document; return the text and a description."""
    try:
        tree = json.loads(data)
    except ValueError:
        return data + b" ", "a space"
    raws: list[str] = []
    done = [_change(draw, tree, raws) for _ in range(draw.randint(1, 3))] if isinstance(tree, dict | list) else []
    text = json.dumps(tree)
    for number, raw in enumerate(raws):
        text = text.replace(json.dumps(_MARK.format(number)), raw)
    if draw.random() < 0.1:
        text, more = _twice(draw, text)
        done.append(more)
    if draw.random() < 0.05:
        text = draw.choice(
            ("\ufeff" + text, text + text, text + "\0", "[" + text + "]", text[: draw.randrange(len(text))])
        )
        done.append("around all")
    return text.encode("utf-8", "surrogatepass"), ", ".join(done)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in `tree`."""
    found = []
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += _places(value)
    return found


def _change(draw: random.Random, tree: Any, raws: list[str]) -> str:
    places = _places(tree)
    if not places:
        return "nothing"
    inside, key = draw.choice(places)
    kind = draw.choice(
        ("leaf", "leaf", "leaf", "near", "near", "near", "raw", "raw", "bomb", "gone", "key", "more", "swap")
    )
    match kind:
        case "leaf":
            inside[key] = copy.deepcopy(draw.choice(LEAVES))
        case "near":
            inside[key] = _near(draw, inside[key])
        case "raw" | "bomb":
            raws.append(draw.choice(BOMBS if kind == "bomb" and draw.random() < 0.5 else RAW))
            inside[key] = _MARK.format(len(raws) - 1)
        case "gone":
            del inside[key]
        case "key" if isinstance(inside, dict):
            inside[draw.choice(("", "x", "\0", "__proto__", "a" * 2_000, str(key).upper()))] = inside.pop(key)
        case "more" if isinstance(inside, list):
            inside[key:key] = [inside[key]] * draw.choice((1, 2, 1_000))
        case "swap":
            there, other = draw.choice(places)
            if not (isinstance(inside[key], dict | list) or isinstance(there[other], dict | list)):
                inside[key], there[other] = there[other], inside[key]
        case _:
            return _change(draw, tree, raws)
    return f"{kind} at {key!s:.40}"


def _near(draw: random.Random, value: Any) -> Any:
    """Return a similar value, mostly of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(
            (value + 1, value - 1, -value, value * 2, value * 1_000_000, value // 2, float(value), str(value))
        )
    if isinstance(value, float):
        return draw.choice((value * 2, -value, value * 1e200, value / 1e200, int(value), str(value)))
    if isinstance(value, str):
        place = draw.randint(0, len(value))
        changed = (
            value + "x",
            value[:place],
            value[:place] + draw.choice("\0,.:=-+/ x0*") + value[place:],
            value.upper(),
            value * 3,
        )
        return draw.choice(changed)
    return value


def _twice(draw: random.Random, text: str) -> tuple[str, str]:
    place = draw.choice([i for i, char in enumerate(text) if char == "{"] or [0])
    key = text[place + 1 :].partition(":")[0] if text[place + 2 : place + 3] != "}" else '"a"'
    return f"{text[: place + 1]}{key}: 0, {text[place + 1 :]}", "a key twice"
