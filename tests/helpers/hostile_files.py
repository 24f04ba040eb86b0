"""Malicious files, and a stream loader that reads them."""

import io
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from helpers.tiny_images import saved
from vitpar.data.shards.index import Labels
from vitpar.data.stream.loader import StreamLoader
from vitpar.data.stream.stream_set import StreamSet
from vitpar.data.transforms.sample import EvalTransform
from vitpar.errors import UserError


def write_tar(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def tar_size(size: int) -> bytes:
    """Return a size in octal digits, or in GNU's base-256 encoding if it is negative or too large for them."""
    return b"%011o\0" % size if 0 <= size < 1 << 33 else (size % (1 << 95) | 1 << 95).to_bytes(12, "big")


def seal_tar(data: bytes) -> bytes:
    """Return the tar file with right checksums of its headers."""
    changed = bytearray(data)
    for match in re.finditer(rb"ustar", data):
        begin = match.start() - 257
        if begin >= 0 and begin + 512 <= len(data):
            changed[begin + 148 : begin + 156] = b" " * 8
            changed[begin + 148 : begin + 156] = b"%06o\0 " % sum(changed[begin : begin + 512])
    return bytes(changed)


def header(name: str, kind: bytes, size: int) -> bytes:
    """Return a 512-byte tar header that claims `size` bytes; `size` may be negative."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = info.tobuf(tarfile.USTAR_FORMAT)
    return seal_tar(block[:124] + tar_size(size) + block[136:])


def tar_member(name: str, body: bytes, kind: bytes = b"0", size: int | None = None) -> bytes:
    """Return a header and the padded content. size: claimed size, None for the right one."""
    return header(name, kind, len(body) if size is None else size) + body + bytes(-len(body) % 512)


def pax(record: bytes, kind: bytes = b"x") -> bytes:
    """Return a PAX extended header of a record `key=value`: x for the next member, g for all later members."""
    length = next(n for n in range(len(record), len(record) + 9) if n == len(record) + 2 + len(str(n)))
    return tar_member("pax", b"%d %s\n" % (length, record), kind)


def jpeg(width: int, height: int) -> bytes:
    gradient = np.linspace(0, 255, width, dtype=np.uint8)
    return saved(np.stack([np.tile(gradient, (height, 1))] * 3, -1), "JPEG", quality=95)


def streamed(*paths: Path | str, label: str = "cls", bad_sample: str = "fail") -> list[int]:
    """Return the labels of all samples that a stream yields."""
    data = StreamSet(tuple(map(str, paths)), 1, 1000, Labels.parse(label))
    found: list[int] = []
    transform = EvalTransform(8)
    loader = StreamLoader(data, transform, batch_size=4, workers=0, bad_sample=bad_sample)  # type: ignore[arg-type]
    for batch in loader:
        if batch.ended:
            return found
        found += [int(label) for label in batch.labels if label >= 0]
    raise AssertionError


LONGEST = 3_000
"""Most characters of an error message, which may quote 200 characters twice, each escaped as six."""
ADDRESS = re.compile(r"\bat 0x(?=[0-9a-f]*[a-f])[0-9a-f]{9,}")
"""Memory address. It is longer than a 32-bit checksum and has a letter, unlike a strategy such as dp10x100000000."""


def message_problem(error: UserError) -> str | None:
    """Return what is wrong with an error message, or None. It must be short plain text without memory addresses."""
    words = str(error)
    if len(words) > LONGEST:
        return f"the message is too long: {len(words):,} characters"
    if found := ADDRESS.search(words):
        return f"the message has an address of memory: {found[0]}"
    odd = next((char for char in words if not char.isprintable() and char != "\n"), None)
    return None if odd is None else f"the message has an unprintable character: {odd!a}"


def accepted(read: Callable[..., object], *arguments: Any) -> bool:
    """Return whether `read` accepts hostile input. If not, it must raise one UserError with a good message."""
    try:
        read(*arguments)
    except UserError as error:
        assert message_problem(error) is None, error
        return False
    return True
