"""Safetensors files with wrong headers."""

from __future__ import annotations

import json
import random

from fuzzing.attacks.jsons import json_attack

SIDES = (-1, 0, 1, 2, 24, 1 << 16, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 1.5, "1", None)


def split(data: bytes) -> tuple[bytes, bytes]:
    """Split a file into its header, without the length, and the data of its tensors."""
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def joined(header: bytes, body: bytes, length: int | None = None) -> bytes:
    """Return a file of a header and data.

    length: claimed length of the header, None for the right one.
    """
    return (len(header) if length is None else length).to_bytes(8, "little") + header + body


def attack(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change a header or lengths; return the bytes and a description."""
    header, body = split(data)
    kind = draw.choice(
        ("json", "json", "shape", "shape", "offsets", "offsets", "type", "length", "body", "more", "padding")
    )
    if kind == "json":
        changed, words = json_attack(draw, header)
        return joined(changed, body), words
    tree = json.loads(header)
    name = draw.choice([name for name in sorted(tree) if name != "__metadata__"])
    entry = tree[name]
    match kind:
        case "shape":
            shape = [draw.choice(SIDES) for _ in range(draw.choice((0, 1, 2, 4, 9, 70)))]
            entry["shape"] = draw.choice(
                (shape, entry["shape"][::-1], [*entry["shape"], 1], entry["shape"] + [0, 1 << 62])
            )
        case "offsets":
            begin, end = entry["data_offsets"]
            values = (
                0,
                1,
                begin,
                begin - 4,
                begin + 4,
                end,
                end + 4,
                len(body),
                len(body) + 1,
                1 << 31,
                1 << 63,
                1 << 64,
                -1,
            )
            entry["data_offsets"] = [draw.choice(values), draw.choice(values)]
        case "type":
            entry["dtype"] = draw.choice(
                ("F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "C64", "", "f32", 1)
            )
        case "length":
            values = (0, 1, len(header) - 1, len(header) + 1, 100_000_000, 100_000_001, 1 << 31, 1 << 62, (1 << 64) - 1)
            return joined(header, body, draw.choice(values)), "length of the header"
        case "body":
            return joined(header, draw.choice((body[:-1], body + b"\0", b"", body * 2))), "length of the tensors"
        case "more":
            numbers = range(draw.choice((1, 2_000)))
            tree |= {
                f"{name}{i}": {"dtype": "F32", "shape": [0], "data_offsets": [len(body), len(body)]} for i in numbers
            }
        case _:
            return joined(header + draw.choice((b" ", b"\0", b"\n", b"x")) * draw.choice((8, 5_000_000)), body), kind
    return joined(json.dumps(tree).encode(), body), f"{kind} of {name}"
