"""Small files in a tar archive that may be compressed by gzip, read without believing the sizes that it claims."""

import tarfile
import zlib
from collections.abc import Container
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from vitpar.data.shards.tar import content, members
from vitpar.errors import DataError, shown
from vitpar.files import open_regular
from vitpar.limits import MAX_RECORD_BYTES

_CHUNK = 1 << 16


def unpacked(path: Path, names: Container[str]) -> dict[str, bytes]:
    """Return the content of the files `names` in the archive at `path`, in whatever folders they are, by name.

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


class _Unpacked:
    """The content of a file that may be compressed by gzip, read forwards.

    Raises OSError behind MAX_RECORD_BYTES of it, EOFError where it is cut off and zlib.error where it is damaged. What
    follows compressed content is not read: Python's gzip would skip zeros behind it one by one.
    """

    def __init__(self, file: BinaryIO, compressed: bool) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS) if compressed else None
        self._place = 0

    def read(self, size: int, /) -> bytes:
        self._refuse(self._place + size)
        pieces = []
        while size and (piece := self._piece(size)):
            pieces.append(piece)
            size -= len(piece)
            self._place += len(piece)
        return b"".join(pieces)

    def seek(self, place: int, /) -> int:
        self._refuse(place)
        while self._place < place and self.read(min(place - self._place, _CHUNK)):
            pass
        return self._place

    def tell(self) -> int:
        return self._place

    def _piece(self, size: int) -> bytes:
        """Return `size` bytes or fewer, none at the end."""
        if self._inflate is None:
            return self._file.read(size)
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(_CHUNK)
            if not packed:
                raise EOFError("it is cut off")
            if piece := self._inflate.decompress(packed, size):
                return piece
        return b""

    def _refuse(self, place: int) -> None:
        if place > MAX_RECORD_BYTES:
            raise OSError(f"it unpacks to more than {MAX_RECORD_BYTES:,} bytes")
