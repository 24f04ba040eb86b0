"""Pickles that run programs, claim huge sizes, or nest deeply; and edits of numbers in harmless pickles."""

from __future__ import annotations

import pickle
import pickletools
import random
import struct

PROTO = b"\x80\x02"
_LARGE = (0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


def _call(module: str, name: str, arguments: bytes = b"(t") -> bytes:
    return b"c" + f"{module}\n{name}\n".encode() + arguments + b"R"


def text(words: str) -> bytes:
    """Return the instruction that pushes a string."""
    return b"X" + struct.pack("<I", len(words.encode())) + words.encode()


_COMMAND = b"(" + text("echo hostile > hostile") + b"t"
PROGRAMS = (
    *(_call("os", "system", _COMMAND), _call("posix", "system", _COMMAND), _call("subprocess", "Popen", _COMMAND)),
    *(_call("builtins", "eval", b"(" + text("1") + b"t"), _call("builtins", "exec", b"(" + text("1") + b"t")),
    *(_call("builtins", "getattr", b"(" + text("a") + text("b") + b"t"), _call("torch.hub", "load", _COMMAND)),
    *(
        _call("numpy", "load", _COMMAND),
        _call("numpy.core.multiarray", "_reconstruct"),
        _call("webbrowser", "open", _COMMAND),
    ),
    b"(" + text("echo hostile > hostile") + b"ios\nsystem\n",
    b"(cos\nsystem\n" + text("echo hostile > hostile") + b"o",
    b"\x8c\x02os\x8c\x06system\x93" + _COMMAND + b"R",
    _call("torch._utils", "_rebuild_tensor_v2", b"(K\1K\2K\3t"),
    _call("torch.serialization", "load", _COMMAND),
    _call("torch", "load", _COMMAND),
    _call("collections", "OrderedDict") + b"}" + text("__reduce__") + text("x") + b"sb",
    _call("argparse", "Namespace") + b"}" + text("a") + b"Nsb",
)
NUMPY = (
    _call("numpy", "dtype", b"(" + text("O8") + b"K\0K\1t")
    + b"(K\3"
    + text("|")
    + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb",
    _call("numpy", "dtype", b"(" + text("V8") + b"K\0K\1t") + b"(K\3" + text("|") + b"N)}JJ\xff\xff\xff\x7fK\1K\x10tb",
    _call("numpy", "dtype", b"(" + text("u1") + b"t") + b"(K\x7f" + text("|") + b"tb",
    _call("numpy", "ndarray", b"((J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftt"),
    _call("numpy", "ndarray", b"((J\xff\xff\xff\x7ftt"),
    _call("numpy.core.multiarray", "_reconstruct", b"(cnumpy\nndarray\n(J\xff\xff\xff\x7ft" + text("b") + b"t"),
    _call("numpy.core.multiarray", "_reconstruct", b"(cnumpy\nndarray\n(K\0t" + text("b") + b"t")
    + b"(K\1(J\xff\xff\xff\x7ft"
    + _call("numpy", "dtype", b"(" + text("O8") + b"t")
    + b"\x89]tb",
    _call("numpy.core.multiarray", "_reconstruct", b"(cnumpy\nndarray\n(K\0t" + text("b") + b"t")
    + b"(K\1(K\x08t"
    + _call("numpy", "dtype", b"(" + text("O8") + b"t")
    + b"\x89"
    + text("A" * 64)
    + b"tb",
    _call("_codecs", "encode", b"(" + text("a") + text("zip") + b"t"),
    _call("_codecs", "encode", b"(K\1K\1t"),
    _call("_codecs", "encode", b"(" + text("a" * 100_000) + text("latin1") + b"t"),
)
SIZES = (
    *(b"r" + struct.pack("<I", index) for index in (1 << 20, 1 << 28, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)),
    *(b"Nr" + struct.pack("<I", index) for index in (1 << 24, 1 << 28, 1 << 31, (1 << 32) - 1)),
    *(b"Np" + str(index).encode() + b"\n" for index in (-1, 1 << 28, 1 << 40, 1 << 70)),
    *(b"\x8e" + struct.pack("<Q", size) for size in (1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)),
    *(b"\x8d" + struct.pack("<Q", size) for size in (1 << 31, 1 << 40, (1 << 64) - 1)),
    *(b"\x96" + struct.pack("<Q", size) for size in (1 << 31, 1 << 34, (1 << 63) - 1, (1 << 64) - 1)),
    *(b"B" + struct.pack("<I", size) for size in ((1 << 31) - 1, (1 << 32) - 1)),
    *(b"X" + struct.pack("<I", size) for size in ((1 << 31) - 1, (1 << 32) - 1)),
    *(b"\x95" + struct.pack("<Q", size) for size in (0, 1 << 31, 1 << 40, (1 << 64) - 1)),
    *(b"\x8b" + struct.pack("<i", size) for size in (-1, (1 << 31) - 1)),
    *(b"T" + struct.pack("<i", size) for size in (-1, (1 << 31) - 1)),
    *(b"j" + struct.pack("<I", index) for index in (0, (1 << 32) - 1)),
    b"I" + b"9" * 100_000 + b"\n",
    b"L" + b"9" * 100_000 + b"L\n",
    b"F1e999\n",
    b"\x80\xff",
    b"P0\n",
    b"\x82\1",
    b"\x97\x98",
)
NESTS = (
    b"(" * 100_000,
    b"]" * 100_000 + b"a" * 99_999,
    b"(" * 100_000 + b"t" * 100_000,
    b"]" + b"\x94]h\0ah\0a" * 60,
    b"]q\0" + b"h\0h\0\x86" * 50,
    b"]q\0h\0a",
    b"}q\0h\0h\0s",
    b"N" * 500_000,
    b"N" + b"\x85" * 200_000,
    b"".join(b"q" + bytes([i % 256]) + b"N" for i in range(10_000)),
)


def hostile(draw: random.Random) -> tuple[bytes, str]:
    """Return a hostile pickle and its kind."""
    kind = draw.choice(("program", "program", "numpy", "numpy", "size", "size", "nest", "endings"))
    begin = draw.choice((PROTO, PROTO, b"", b"\x80\x04", b"\x80\x05"))
    parts = {"program": PROGRAMS, "numpy": NUMPY, "size": SIZES, "nest": NESTS}
    if kind == "endings":
        return draw.choice(
            (b"", b".", b"\x80\x02.", b"N", b"(.", b"0.", b"2.", b"1.", b"a.", b"s.", b"b.", b"R.", b"Q.")
        ), kind
    found = draw.choice(parts[kind])
    wrapped = draw.choice((found, found, b"}" + text("data") + found + b"s", b"]" + found + b"a"))
    return begin + wrapped + draw.choice((b".", b".", b"")), kind


def renumbered(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Change numbers or lengths in one to three instructions of a pickle; return the bytes and a description."""
    try:
        places = [
            (place, op.name)
            for op, argument, place in pickletools.genops(data)
            if place is not None and isinstance(argument, int | str | bytes) and op.code not in ("c", "i")
        ]
    except Exception:  # not a complete pickle: it is left unchanged
        places = []
    changed, done = bytearray(data), []
    for _ in range(draw.randint(1, 3) if places else 0):
        place, name = draw.choice(places)
        widths = {
            "BININT1": 1,
            "BININT2": 2,
            "BINPUT": 1,
            "BINGET": 1,
            "SHORT_BINSTRING": 1,
            "SHORT_BINBYTES": 1,
            "LONG1": 1,
        }
        width = widths.get(name, 4)
        changed[place + 1 : place + 1 + width] = (draw.choice(_LARGE) % (1 << 8 * width)).to_bytes(width, "little")
        done.append(name)
    return bytes(changed), ", ".join(done) or "nothing"


def plain(value: object, protocol: int = 2) -> bytes:
    """Return a harmless pickle of `value`."""
    return pickle.dumps(value, protocol=protocol)
