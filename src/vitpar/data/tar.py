"""Reader of tar files from untrusted sources.

Python's tarfile trusts the sizes in a header before it reads the bytes, stops silently at a damaged header, and ignores
data after the end of the archive. This reader raises an error in each of these cases. It also limits how much a gzip
file may unpack to, which Python's gzip does not.
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
    MAX_TAR_EXTENDED_BYTES,
    MAX_TAR_NAME_BYTES,
    MAX_TAR_PADDING_BYTES,
)
from vitpar.object_store import ObjectPath
from vitpar.text import shown

_NAMES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_CHUNK, _PIECE = 1 << 16, 1 << 20  # bytes read at a time, of compressed data or padding, and of content


class Readable(Protocol):
    """File that is read forwards; `seek` is called only for places ahead."""

    def read(self, size: int, /) -> bytes: ...

    def seek(self, place: int, /) -> int: ...

    def tell(self) -> int: ...


class _Header(tarfile.TarInfo):
    """Header of a member, checked before tarfile reads any of the bytes that it announces."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the header in a block of 512 bytes.

        Raises tarfile.ReadError, and tarfile.EOFHeaderError for a block of zeros.
        """
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("it is truncated") from None
        except tarfile.HeaderError as error:  # tarfile would stop as if the archive ended here
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


def members(file: Readable) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an uncompressed tar file that extends from the current position to the end of `file`.

    When a member is yielded, `file` is positioned at its data, which the caller may read or not.

    Raises tarfile.ReadError for a file that is no tar file, is damaged or cut off, or has anything but a limited number
    of zeros after its end.
    Raises OSError as `file` does.
    """
    count, place = 0, -1
    try:
        tar = tarfile.open(fileobj=file, mode="r:", tarinfo=_Header)  # type: ignore[call-overload]  # noqa: SIM115
        while member := tar.next():
            tar.members.clear()  # tarfile would keep all of them in memory
            count += 1
            # An extended header can cause each of these.
            if member.size < 0 or member.issparse() or tar.offset <= place:
                raise tarfile.ReadError("the size of a member is wrong, or it is sparse")
            if count > MAX_MEMBERS:
                raise tarfile.ReadError(f"it has more than {MAX_MEMBERS:,} members")
            place = tar.offset
            yield member
    except (ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise tarfile.ReadError(f"a header is invalid ({type(error).__name__})") from None
    zeros = 0
    while chunk := file.read(_CHUNK):
        zeros += len(chunk)
        if chunk.strip(b"\0"):
            raise tarfile.ReadError("data follows its end, such as another tar file")
        if zeros > MAX_TAR_PADDING_BYTES:
            raise tarfile.ReadError(f"more than {MAX_TAR_PADDING_BYTES:,} zeros follow its end")


def content(file: Readable, member: tarfile.TarInfo) -> bytes:
    """Return the data of the member that `members` has just yielded.

    Raises tarfile.ReadError if the file ends early.
    """
    data = file.read(member.size)
    if len(data) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    return data


class ForwardReader:
    """File that is read forwards in pieces, which a subclass provides.

    Memory is allocated for bytes that have arrived, not for the size that a header claims.

    most: maximum size in bytes; None for no limit.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._place = 0

    def _piece(self, size: int) -> bytes:
        """Return at least one and at most `size` of the next bytes; none at the end."""
        raise NotImplementedError

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or fewer at the end.

        Raises OSError beyond the maximum size.
        """
        self._refuse(self._place + size)
        pieces = []
        while size > 0 and (piece := self._piece(min(size, _PIECE))):
            pieces.append(piece)
            size -= len(piece)
            self._place += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, place: int, /) -> int:
        """Read up to `place`, which is ahead, or to the end, and return the position reached.

        Raises OSError as `read` does.
        """
        self._refuse(place)
        while self._place < place and self.read(min(place - self._place, _PIECE)):
            pass
        return self._place

    def tell(self) -> int:
        """Return the number of bytes read so far."""
        return self._place

    def _refuse(self, place: int) -> None:
        if self._most is not None and place > self._most:
            raise OSError(f"it unpacks to more than {self._most:,} bytes")


class _Unpacked(ForwardReader):
    """Content of a file that may be compressed by gzip.

    Data after the compressed content is not read; Python's gzip would skip zeros there one by one.

    Raises EOFError if the compressed data is cut off, and zlib.error if it is damaged.
    """

    def __init__(self, file: BinaryIO, compressed: bool, most: int) -> None:
        super().__init__(most)
        self._file = file
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS) if compressed else None

    def _piece(self, size: int) -> bytes:
        if self._inflate is None:
            return self._file.read(size)
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(_CHUNK)
            if not packed:
                raise EOFError("it is truncated")
            if piece := self._inflate.decompress(packed, size):
                return piece
        return b""


def unpacked(path: Path, names: Container[str], most: int) -> dict[str, bytes]:
    """Return the contents of the files `names` in a tar archive, by name.

    The files may be in any folder of the archive; files that it lacks are left out.

    path: the archive; compressed by gzip unless its name ends with ".tar".
    most: maximum bytes of the archive when unpacked.

    Raises DataError for a damaged archive, and for one that is larger.
    """
    contents: dict[str, bytes] = {}
    try:
        with open_regular(path) as packed:
            file = _Unpacked(packed, compressed=not path.name.endswith(".tar"), most=most)
            for member in members(file):
                name = PurePosixPath(member.name).name
                if member.isreg() and name in names:
                    contents[name] = content(file, member)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise DataError(f"'{path}' is not a valid tar file ({shown(error)}): fetch it again") from None
    return contents
