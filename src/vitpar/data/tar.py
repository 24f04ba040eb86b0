"""Reader of tar files that refuses damaged ones.

Python's tarfile stops silently at a damaged header, and ignores data after the end of the archive. This reader raises
an error in both cases.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from vitpar.errors import DataError
from vitpar.io import open_regular
from vitpar.object_store import ObjectPath
from vitpar.text import shown

_PIECE = 1 << 20  # bytes read at a time


class Readable(Protocol):
    """File that is read forwards; `seek` is called only for places ahead."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, place: int, /) -> int: ...

    def tell(self) -> int: ...


class _Header(tarfile.TarInfo):
    """Header of a member, which is refused if it is damaged."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the header in a block of 512 bytes.

        Raises tarfile.ReadError, and tarfile.EOFHeaderError for a block of zeros.
        """
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it is truncated") from None
        except tarfile.HeaderError as error:  # tarfile would stop as if the archive ended here
            raise tarfile.ReadError(str(error)) from None


@contextmanager
def open_tar(path: Path | ObjectPath) -> Iterator[BinaryIO]:
    """Open a tar file as a context manager.

    Raises DataError, which names the file, in place of a TarError or OSError within the context.
    """
    try:
        with open_regular(path) as file:
            yield file
    except tarfile.TarError as error:
        raise DataError(f"'{path}' is not a valid tar file ({shown(error)}): fetch or write it again") from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def members(file: Readable, end: int | None = None) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an uncompressed tar file that extends from the current position of `file` to `end`.

    When a member is yielded, `file` is positioned at its data, which the caller may read or not.

    end: place in `file`; None for its end.

    Raises tarfile.ReadError for a file that is no tar file, is damaged or cut off, or has anything but zeros after its
    end.
    Raises OSError as `file` does.
    """
    try:
        tar = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)  # type: ignore[call-overload]  # noqa: SIM115
        while member := tar.next():
            tar.members.clear()  # tarfile would keep all of them in memory
            if member.size < 0 or member.issparse():
                raise tarfile.ReadError("the size of a member is wrong, or it is sparse")
            if end is not None and member.offset_data + member.size > end:
                raise tarfile.ReadError("it is truncated")
            yield member
    except (ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as error:
        raise tarfile.ReadError(f"a header is invalid ({type(error).__name__})") from None
    if end is not None and file.tell() > end:
        raise tarfile.ReadError("it is truncated")
    while chunk := file.read(_PIECE if end is None else min(_PIECE, end - file.tell())):
        if chunk.strip(b"\0"):
            raise tarfile.ReadError("data follows its end, such as another tar file")


def content(file: Readable, member: tarfile.TarInfo) -> bytes:
    """Return the data of the member that `members` has just yielded.

    Raises tarfile.ReadError if the file ends early.
    """
    try:
        data = file.read(member.size)
    except (MemoryError, OverflowError):  # a damaged size
        data = b""
    if len(data) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    return data
