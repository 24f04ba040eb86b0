"""Mutations of TOML: unexpected values, duplicate keys, invalid syntax, very large or deeply nested values."""

from __future__ import annotations

import random
from collections.abc import Sequence

TOML_VALUES = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "1e308",
        "-0.0",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "9223372036854775808",
        "1_000",
        "0o17",
        "0b1",
        "0xFF",
    ),
    *(
        "true",
        "false",
        '""',
        '"x"',
        "'x'",
        '"""x"""',
        "[]",
        "{}",
        "[[]]",
        "[1, 'x']",
        "{a = 1}",
        "{a = {b = {}}}",
        "[0, 0]",
    ),
    *(
        "1979-05-27T07:32:00Z",
        "07:32:00",
        "1979-05-27",
        '"\\u0000"',
        '"\\u001b[31m"',
        '"\\uD800"',
        '"\\U0010FFFF"',
        "\x00",
    ),
    *(
        '"' + "x" * 300 + '"',
        '"' + "x" * 5_000 + '"',
        "1" * 5_000,
        '"../../x"',
        '"/etc/passwd"',
        '"pipe:sh"',
        "[1,",
        "{",
        "'",
    ),
)
TOML_BOMBS = (
    *("[" * 500 + "]" * 500, "[" * 100_000, "{a = " * 5_000, "[" * 20_000 + "]" * 20_000, '"' + "x" * 2_000_000 + '"'),
    *("[" + "0," * 300_000 + "]", "0x" + "F" * 100_000, "1" * 200_000, "1e" + "9" * 5_000, "0." + "1" * 100_000),
)
TOML_LINES = (
    *(
        ".".join("a" * 30) + " = 1",
        ".".join("a" * 1_000) + " = 1",
        ".".join("a" * 20_000) + " = 1",
        "a" * 100_000 + " = 1",
    ),
    *(
        "[" + ".".join("b" * 20_000) + "]",
        "[[c]]\n" * 3_000,
        '"" = 1',
        "'\\' = 1",
        "[model]",
        "[[model]]",
        "model.x.y = 1",
    ),
    *(
        "[]",
        "= 1",
        "x",
        "x = 1\nx = 2",
        "#" + "x" * 100_000,
        "\ufeff",
        "\r",
        "\x00",
        '"\\u0000" = 1',
        "[a.b]\n[a]\nb = 1",
    ),
    *("\n".join(f"k{i}.a = 1" for i in range(3_000)), "d" + ".e" * 3_000 + " = 1\nd" + ".e" * 2_999 + ".f = 1"),
)


def toml_attack(draw: random.Random, data: bytes, words: Sequence[str] = ()) -> tuple[bytes, str]:
    """Make one to three changes to the lines of a TOML document; return the text and a description.

    words: further lines that may be inserted.
    """
    lines, done = data.decode(errors="replace").split("\n"), []
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(lines))
        key, equals, _value = lines[place].partition("=")
        kind = draw.choice(("value", "value", "value", "value", "bomb", "line", "word", "word", "twice", "gone", "key"))
        match kind:
            case "value" if equals:
                lines[place] = f"{key}= {draw.choice(TOML_VALUES)}"
            case "bomb" if equals and draw.random() < 0.5:
                lines[place] = f"{key}= {draw.choice(TOML_BOMBS)}"
            case "key" if equals:
                lines[place] = f"{draw.choice((key[:-2], key.strip() + 'x', key.strip() + '.x', key.upper()))}={_value}"
            case "twice":
                lines.insert(place, lines[place])
            case "gone":
                del lines[place]
                lines = lines or [""]
            case "word" if words:
                lines.insert(place + 1, draw.choice(words))
            case _:
                lines.insert(place, draw.choice(TOML_LINES))
                kind = "line"
        done.append(f"{kind} in line {place + 1}")
    return "\n".join(lines).encode("utf-8", "surrogatepass"), ", ".join(done)
