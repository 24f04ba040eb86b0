"""Reads tar files that somebody else may have made.

Python's tarfile believes the sizes in a header before it has seen the bytes, stops without a word at a header that is
damaged, and does not look behind the end. Here each of these is an error. Its gzip has no limit to what it unpacks.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol, Self

from vitpar.errors import DataError
from vitpar.io import open_regular
from vitpar.limits import (
    MAX_MEMBERS,
    MAX_RECORD_BYTES,
    MAX_TAR_EXTENDED_BYTES,
    MAX_TAR_NAME_BYTES,
    MAX_TAR_PADDING_BYTES,
)
from vitpar.text import shown

_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_CHUNK, _PIECE = 1 << 16, 1 << 20


class Readable(Protocol):
    """A file that is read forwards. `seek` is only asked for places ahead."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, place: int, /) -> int: ...

    def tell(self) -> int: ...


class _Header(tarfile.TarInfo):
    """A member's header, checked before tarfile reads anything because of it."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the header in a block of 512 bytes. Raises tarfile.ReadError, and EOFHeaderError for a block of
        zeros."""
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it ends too early") from None
        except tarfile.HeaderError as error:  # at which tarfile would stop as if the archive ended here
            raise tarfile.ReadError(str(error)) from None
        if header.type in _NAMES and header.size > MAX_TAR_NAME_BYTES:
            raise tarfile.ReadError(f"a name has {header.size:,} bytes")
        if header.type in _EXTENDED and header.size > MAX_TAR_EXTENDED_BYTES:
            raise tarfile.ReadError(f"an extended header has {header.size:,} bytes; leave out extended attributes")
        if header.size < 0:
            raise tarfile.ReadError(f"a member has {header.size:,} bytes")
        if header.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.ReadError("it has a sparse member")
        return header


@contextmanager
def open_tar(path: Path) -> Iterator[BinaryIO]:
    """Open a tar file. Raises DataError, naming it, for what goes wrong while it is open."""
    try:
        with open_regular(path) as file:
            yield file
    except tarfile.TarError as error:
        raise DataError(f"'{path}' is not a whole tar file ({shown(error)}): fetch or write it again") from None
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}") from None


def members(file: Readable) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an uncompressed tar file that begins where `file` stands, which has to end with it.

    When a member is given out, `file` stands at its data; reading them is optional. Raises tarfile.ReadError for a file
    that is no tar file, is damaged, is cut off, or has anything but some zeros behind its end; OSError as `file` does.
    """
    count, place = 0, -1
    try:
        tar = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)  # type: ignore[call-overload]  # noqa: SIM115
        while member := tar.next():
            tar.members.clear()  # it would keep all of them
            count += 1
            if member.size < 0 or member.issparse() or tar.offset <= place:  # an extended header may say so
                raise tarfile.ReadError("the size of a member is wrong, or it is sparse")
            if count > MAX_MEMBERS:
                raise tarfile.ReadError(f"it has more than {MAX_MEMBERS:,} members")
            place = tar.offset
            yield member
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise tarfile.ReadError(f"a header makes no sense ({type(error).__name__})") from None
    zeros = 0
    while chunk := file.read(_CHUNK):
        zeros += len(chunk)
        if chunk.strip(b"\0"):
            raise tarfile.ReadError("something follows its end, such as another tar file")
        if zeros > MAX_TAR_PADDING_BYTES:
            raise tarfile.ReadError(f"more than {MAX_TAR_PADDING_BYTES:,} zeros follow its end")


def content(file: Readable, member: tarfile.TarInfo) -> bytes:
    """Return the data of the member that `members` has just given. Raises tarfile.ReadError where they end early."""
    data = file.read(member.size)
    if len(data) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    return data


class ForwardReader:
    """A file that is read forwards, a piece at a time: memory is taken for what has come, not for what is claimed.

    A subclass gives the pieces. most: bytes that it may have; None for any number.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._place = 0

    def _piece(self, size: int) -> bytes:
        """Return the next `size` bytes or fewer, none at the end."""
        raise NotImplementedError

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or as many as there are before the end. Raises OSError for more than may be."""
        self._refuse(self._place + size)
        pieces = []
        while size > 0 and (piece := self._piece(min(size, _PIECE))):
            pieces.append(piece)
            size -= len(piece)
            self._place += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, place: int, /) -> int:
        """Read on until `place`, which is ahead, or the end. Raises OSError as `read` does."""
        self._refuse(place)
        while self._place < place and self.read(min(place - self._place, _PIECE)):
            pass
        return self._place

    def tell(self) -> int:
        """Return how many bytes have been read."""
        return self._place

    def _refuse(self, place: int) -> None:
        if self._most is not None and place > self._most:
            raise OSError(f"it unpacks to more than {self._most:,} bytes")


class _Unpacked(ForwardReader):
    """The content of a file that may be compressed by gzip.

    Raises EOFError where it is cut off and zlib.error where it is damaged. What follows compressed content is not read:
    Python's gzip would skip zeros behind it one by one.
    """

    def __init__(self, file: BinaryIO, compressed: bool) -> None:
        super().__init__(MAX_RECORD_BYTES)
        self._file = file
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS) if compressed else None

    def _piece(self, size: int) -> bytes:
        if self._inflate is None:
            return self._file.read(size)
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(_CHUNK)
            if not packed:
                raise EOFError("it is cut off")
            if piece := self._inflate.decompress(packed, size):
                return piece
        return b""


def unpacked(path: Path, names: Container[str]) -> dict[str, bytes]:
    """Return the content of the files `names` in the archive at `path`, which may be compressed by gzip, in whatever
    folders they are, by name.

    Files that it does not have are left out. Raises DataError for a damaged archive, and for one that unpacks to more
    than MAX_RECORD_BYTES.
    """
    found: dict[str, bytes] = {}
    try:
        with open_regular(path) as packed:
            file = _Unpacked(packed, compressed=not path.name.endswith(".tar"))
            for member in members(file):
                name = PurePosixPath(member.name).name
                if member.isreg() and name in names:
                    found[name] = content(file, member)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"'{path}' is not a whole tar file ({shown(error)}): fetch it again") from None
    return found
