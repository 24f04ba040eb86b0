"""Reads what `torch.save` wrote.

That is a pickle, which can run anything when it is read; only with `trust` is it read as one, else by torch's reader
that makes tensors and plain containers alone (``weights_only``).
"""

from __future__ import annotations

import argparse
import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from vitpar.errors import DataError, shown
from vitpar.files import open_regular
from vitpar.limits import MAX_PICKLED_WORD_CHARS, MAX_ZIP_LISTING_BYTES

_LEGACY_PICKLES = 5
"""In a file that is no zip file: its format's number twice, the machine, the object, and the names of its storages."""

_DAMAGED = (OSError, EOFError, ValueError, ArithmeticError, LookupError, NotImplementedError, zipfile.BadZipFile)
"""What zipfile and pickletools raise for a file that is no zip file or no pickle, or is damaged."""


def unpickled(file: Path, trust: bool) -> Any:
    """Return what `torch.save` put into `file`. trust: read it as a pickle, which may run code. Raises DataError."""
    try:
        with open_regular(file) as opened:
            zipped = opened.read(4) == b"PK\x03\x04"  # how torch tells its two formats apart
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error.strerror}") from None
    if zipped:
        _refuse_bombs(file)
    if not trust:
        _refuse_long_words(file, zipped)
    try:
        # DeiT's and MAE's files keep their command line beside the parameters, which is attributes and nothing more.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the pickle's protocol
            # Mapped, a tensor cannot claim more memory than the file has.
            if zipped:
                return torch.load(file, map_location="cpu", weights_only=not trust, mmap=True)
            with _Bounded(file) as bounded:
                return torch.load(bounded, map_location="cpu", weights_only=not trust)
    except Exception as error:  # a hostile file can make the reader stumble in any way
        said = " ".join(str(error).split())
        other = re.search(r"GLOBAL:? (\S+)|operand (\d+)", said)
        if isinstance(error, pickle.UnpicklingError) and not trust and other:
            what = shown(other[1] or f"the instruction {other[2]}")
            raise DataError(
                f"'{file}' holds more than tensors ({what}), which could run code when it is read: ask for "
                "safetensors, or say --trust if you trust whoever made it"
            ) from None
        sentence = shown(said.partition("Trying to load")[0])
        raise DataError(f"'{file}' cannot be read: {sentence or type(error).__name__}") from None


class _Listed(io.FileIO):
    """A zip file of which only the listing is read, and no long one: each of its entries becomes a large object."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_ZIP_LISTING_BYTES:
            raise OSError(f"its listing has more than {MAX_ZIP_LISTING_BYTES:,} bytes")
        return super().read(size) or b""


_SMALL = 1 << 16  # bytes that need no look at what there is


class _Bounded(io.BufferedReader):
    """A file that makes room for what it has, where it is asked for more."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and 0 <= size <= _SMALL:
            return super().read(size)
        left = max(0, self._size - self.tell())
        return super().read(left if size is None or size < 0 else min(size, left))


def _refuse_bombs(file: Path) -> None:
    """torch.save compresses nothing, so a file is at least as large as what is in it."""
    try:
        with _Listed(file) as opened, zipfile.ZipFile(opened) as archive:
            inside = archive.infolist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"'{file}' cannot be read: {shown(error)}") from None
    size = file.stat().st_size
    unpacked = sum(entry.file_size for entry in inside)
    if unpacked > size or any(entry.compress_type != zipfile.ZIP_STORED for entry in inside):
        raise DataError(
            f"'{file}' has {size:,} bytes and unpacks to {unpacked:,}, which no file of torch.save does: do not use it"
        )


def _refuse_long_words(file: Path, zipped: bool) -> None:
    """Refuse what torch would need very long to refuse: to explain an error, it searches its text for patterns that
    take the square of the length of a word."""
    try:
        for content in _pickles(file, zipped):
            for _, value, _ in pickletools.genops(content):
                if isinstance(value, str | bytes) and len(value) > MAX_PICKLED_WORD_CHARS:
                    longest = max(map(len, value.split()), default=0)
                    if longest > MAX_PICKLED_WORD_CHARS:
                        raise DataError(f"'{file}' has a word of {longest:,} characters: ask for safetensors")
    except _DAMAGED as error:
        raise DataError(f"'{file}' cannot be read: {shown(error) or 'it is cut off'}") from None


def _pickles(file: Path, zipped: bool) -> Iterator[IO[bytes]]:
    """Yield files that stand where a pickle begins."""
    if not zipped:
        with _Bounded(file) as content:
            for _ in range(_LEGACY_PICKLES):
                if content.peek(1):
                    yield content
        return
    with _Listed(file) as opened, zipfile.ZipFile(opened) as archive:
        for entry in archive.infolist():
            if entry.filename.endswith("data.pkl"):
                entry.CRC = None  # type: ignore[assignment]  # torch.save may leave it out
                yield io.BytesIO(archive.read(entry))
