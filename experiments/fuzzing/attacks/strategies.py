"""Random strategy strings, valid and invalid."""

from __future__ import annotations

import random

DEGREES = (
    "",
    "",
    "1",
    "2",
    "2",
    "4",
    "3",
    "0",
    "-1",
    "16",
    "64",
    "65536",
    "65537",
    "999999999",
    "1000000000",
    "01",
    "2147483648",
)
ROLES = ("dp", "fsdp", "tp", "pp", "dp", "fsdp", "tp", "ep", "DP", "\u0131", "")
FLAGS = (
    "ckpt",
    "ckpt.full",
    "ckpt.selective",
    "sp",
    "2d",
    "2.5d",
    "2.5d@2",
    "3d",
    "zero1",
    "zero2",
    "offload",
    "ckpt.x",
    "zero9",
    "",
    "2.5d@0",
)
LAYERS = (
    "embed",
    "head",
    "*",
    "0",
    "1-3",
    "0-11",
    "3-1",
    "999999999",
    "0-999999999",
    "*-1",
    "",
    "1-",
    "embed-head",
    "00",
    "-1",
    "1,2",
)
EDITS = (
    "x",
    "xx",
    "+",
    "++",
    ":",
    "=",
    ",",
    " ",
    "\t",
    "\0",
    "\u00d7",
    "\u2028",
    "\x1b[31m",
    "@",
    ".",
    "-",
    "9" * 10,
    "\u0661",
    "A",
    "pp",
    ".json",
)


def strategy(draw: random.Random) -> str:
    """Return a random strategy string."""
    text = _layered(draw) if draw.random() < 0.4 else _uniform(draw, draw.random() < 0.6)
    if draw.random() < 0.1:
        text = draw.choice(
            (
                text * draw.choice((2, 500)),
                text.upper(),
                f" {text}",
                text[::-1],
                "x".join([text] * 2_000),
                "",
                "x" * 70_000,
            )
        )
    for _ in range(draw.choice((0, 0, 0, 1, 2))):
        place = draw.randint(0, len(text))
        text = text[:place] + draw.choice(EDITS) + text[place + draw.choice((0, 1)) :]
    return text


def _uniform(draw: random.Random, sane: bool) -> str:
    """Return a random strategy of one layer.

    sane: whether it should probably parse.
    """
    if sane:
        roles = draw.sample(("dp", "fsdp", "tp", "pp"), draw.choice((1, 2, 3)))
        axes = [f"{role}{draw.choice(('1', '2', '2', '4', '8'))}" for role in roles]
        flags = draw.sample(FLAGS[:11], draw.choice((0, 0, 1, 2)))
    else:
        axes = [draw.choice(ROLES) + draw.choice(DEGREES) for _ in range(draw.choice((1, 1, 2, 3, 5)))]
        flags = [draw.choice(FLAGS) for _ in range(draw.choice((0, 0, 1, 2, 4)))]
    return "+".join(["x".join(axes), *flags])


def _layered(draw: random.Random) -> str:
    sane = draw.random() < 0.6
    if sane:
        size = draw.choice(("2", "4"))
        kinds = (f"dp{size}", f"tp{size}", f"fsdp{size}", f"fsdp{size}+ckpt", f"tp{size}+sp")
        cut = draw.randint(1, 10)
        groups = [f"embed={draw.choice(kinds)}", f"0-{cut}={draw.choice(kinds)}", f"*={draw.choice(kinds)}"]
        return f"pp{draw.choice(('', '1', '2', '4'))}: " + ", ".join(
            draw.sample(groups[:2], draw.choice((0, 1, 2))) + groups[2:]
        )
    groups = [
        f"{draw.choice(LAYERS)}={_uniform(draw, draw.random() < 0.7)}" for _ in range(draw.choice((1, 2, 3, 400)))
    ]
    return f"pp{draw.choice(DEGREES)}{draw.choice((':', ': ', ' :'))}" + draw.choice((",", ", ")).join(groups)
