"""Tar shards of text: for each sequence a member `KEY.npy`, a one-dimensional array that `numpy.load` reads."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitpar.data.shards.manifest import ROW
from vitpar.data.tar import content, members, open_tar
from vitpar.errors import DataError
from vitpar.object_store import ObjectPath
from vitpar.text import shown

HEADER = 128
"""Bytes before the ids in a member."""
_BLOCK, _RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE


@lru_cache(maxsize=4096)
def npy_header(length: int, dtype: str) -> bytes:
    """Return the header of the .npy format, version 1.0, of `length` numbers of the type `dtype`, such as `<u2`."""
    fields = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({length},), }}".encode()
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + fields.ljust(HEADER - 11) + b"\n"


def lengths_of(sizes: NDArray[np.int64], dtype: np.dtype) -> NDArray[np.int64]:
    """Return the number of ids in members of these sizes, int64 [n]; 0 for a size that no sequence has."""
    lengths, rest = np.divmod(sizes - HEADER, dtype.itemsize)
    return np.where((rest == 0) & (lengths > 0), lengths, 0)


def write_shard(path: Path, sequences: Iterable[tuple[int, NDArray[np.unsignedinteger]]]) -> None:
    """Write a shard. The same sequences give the same bytes.

    sequences: number of each sequence, which becomes its key, and its ids.
    """
    size = 0
    with path.open("wb") as file:
        for number, ids in sequences:
            data = npy_header(len(ids), ids.dtype.str) + ids.tobytes()
            file.write(_tar_header(f"{number:08d}.npy".encode(), len(data)))
            file.write(data)
            file.write(bytes(-len(data) % _BLOCK))
            size += _BLOCK + len(data) + -len(data) % _BLOCK
        file.write(bytes(2 * _BLOCK + -(size + 2 * _BLOCK) % _RECORD))


def _tar_header(name: bytes, size: int) -> bytes:
    """Return the header of a tar member; tarfile takes ten times as long."""
    header = bytearray(_plain_header())
    header[: len(name)] = name
    header[124:136] = b"%011o\0" % size
    header[148:156] = b"%06o\0 " % (sum(header) + 8 * ord(" "))  # the checksum counts itself as spaces
    return bytes(header)


@lru_cache(maxsize=1)
def _plain_header() -> bytes:
    member = tarfile.TarInfo()
    member.mode, member.uname, member.gname = 0o444, "bigdata", "bigdata"  # as webdataset's TarWriter does
    header = bytearray(member.tobuf(tarfile.USTAR_FORMAT))
    header[148:156] = bytes(8)
    return bytes(header)


def scan_text(path: Path | ObjectPath, *, checksums: bool = True) -> np.ndarray:
    """Find the sequences in a shard of text: index rows, ROW [sequences], with the columns `shard` and `label` at 0.

    checksums: whether to read the sequences for their checksums; without, column `crc` is 0.

    Raises DataError for a file that is no complete tar file, or that has two sequences with one key.
    """
    found: dict[str, tuple[int, int, int]] = {}
    with open_tar(path) as file:
        for member in members(file):
            key, dot, extension = member.name.partition(".")
            if not member.isreg() or dot + extension != ".npy":
                continue
            if key in found:
                raise DataError(f"'{path.name}/{shown(member.name)}' occurs twice: pack the data set again")
            crc = zlib.crc32(content(file, member)) if checksums else 0
            found[key] = member.offset_data, member.size, crc
    rows = np.zeros(len(found), ROW)
    for name, column in zip(("offset", "size", "crc"), zip(*found.values(), strict=True), strict=False):
        rows[name] = column
    return rows
