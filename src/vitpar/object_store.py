"""Files in object storage that speaks S3, named `s3://BUCKET/KEY`, for readers of files that may be untrusted.

obstore reads them: one library without dependencies, whose requests do not hold the interpreter's lock. Its environment
variables say where the storage is and who reads (AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, …). Names have no place for either, so neither is in a recipe, a log or a message. Messages of
the library are not quoted, since it may put a token into a URL: only the class of an error, and words from `_REASONS`.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitpar.errors import DataError
from vitpar.text import shown

if TYPE_CHECKING:
    from obstore.store import S3Store

PREFIX = "s3://"
"""Beginning of the names of objects."""
_NAME = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/([^\x00-\x1f\x7f]*))?")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables with the address of the storage, in order of precedence."""
_READ_AHEAD = 8 << 20
"""Bytes that a request for a file that is read forwards asks for."""
_SILENT_S = 60
"""Seconds after which a request without an answer, or with errors of the server, is given up."""
_REASONS = {
    r"169\.254\.|[Cc]redentialProvider": "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    r"dns error": "its host is unknown",
    r"kind: Timeout|TimedOut": "it answers too slowly",
    r"kind: Connect": "it cannot be reached",
    r"status: 30\d|received redirect": "the bucket is in another region: set AWS_REGION",
}
"""Reasons in messages, by expressions that find them in those of the library."""


@dataclass(frozen=True)
class ObjectPath:
    """Name of an object, or of the objects that begin with it and a slash: a folder. As `Path` where readers need it.

    Raises OSError from every method that asks the storage.
    """

    bucket: str
    """Name of the bucket."""
    key: str
    """Key in the bucket, without slashes at its ends; empty for all of the bucket."""

    @classmethod
    def parse(cls, text: str) -> ObjectPath:
        """Return the name in `text`.

        Raises DataError for a name without a bucket, with credentials or options, or that leads out of its folder.
        """
        match = _NAME.fullmatch(text)
        key = (match[2] or "").strip("/") if match else ""
        if match is None or {"", ".", ".."} & set(key.split("/") if key else ()):
            # Without what may be credentials: all before an @, and options.
            safe = re.sub(r"[?#].*", "", re.sub(r"^s3://.*@", PREFIX, text))
            raise DataError(
                f"'{shown(safe)}' is not a name such as s3://BUCKET/FOLDER: write it so, and set "
                "credentials and endpoint in the environment"
            )
        return cls(match[1], key)

    def __str__(self) -> str:
        return f"{PREFIX}{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """Last part of the key."""
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> ObjectPath:
        """Folder of the object."""
        return ObjectPath(self.bucket, self.key.rpartition("/")[0])

    def is_file(self) -> bool:
        """Return whether the object exists."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def stat(self) -> ObjectStat:
        """Return size and version of the object."""
        with self._errors() as obstore:
            meta = obstore.head(self._store, self.key)
        return ObjectStat(meta["size"], meta["e_tag"])

    def read_bytes(self, limit: int | None) -> bytes:
        """Return the content of the object, of at most `limit` bytes."""
        with self._errors() as obstore:
            answer = obstore.get(self._store, self.key)
            if limit is not None and answer.meta["size"] > limit:
                raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", str(self))
            return bytes(answer.bytes())

    def read_range(self, offset: int, size: int, version: str | None) -> bytes:
        """Return `size` bytes from `offset` on, or those up to the end.

        version: of the object; another one is refused. None reads any.
        """
        options: Any = {"range": (offset, offset + size)} | ({"if_match": version} if version else {})
        with self._errors() as obstore:
            return bytes(obstore.get(self._store, self.key, options=options).bytes())

    def open(self) -> BinaryIO:
        """Open the object for reading; another version of it, if it is replaced meanwhile, is refused."""
        return io.BufferedReader(_ObjectFile(self), _READ_AHEAD)

    def files(self) -> dict[str, ObjectStat]:
        """Return size and version of the objects in the folder, by name in it; a name may have slashes."""
        found: dict[str, ObjectStat] = {}
        with self._errors() as obstore:
            for page in obstore.list(self._store, prefix=self.key or None):
                for meta in page:
                    found[meta["path"].removeprefix(f"{self.key}/")] = ObjectStat(meta["size"], meta["e_tag"])
        return found

    def write(self, file: BinaryIO) -> None:
        """Store the content of `file`, in parts if it is large. The object appears when it is complete."""
        with self._errors() as obstore:
            obstore.put(self._store, self.key, file)

    def remove(self) -> None:
        """Remove the object; nothing happens if there is none."""
        with self._errors() as obstore:
            obstore.delete(self._store, self.key)

    @property
    def _store(self) -> S3Store:
        return _store(self.bucket, next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None))

    @contextmanager
    def _errors(self) -> Iterator[Any]:
        """Yield the library, and replace its errors by OSErrors without its texts, which may contain secrets."""
        import obstore
        from obstore import exceptions

        try:
            yield obstore
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self)) from None
        except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError, PermissionError):
            raise PermissionError(errno.EACCES, "the storage denies access", str(self)) from None
        except exceptions.PreconditionError:
            raise OSError(errno.ESTALE, "it was changed during use", str(self)) from None
        except exceptions.BaseError as error:
            status = re.search(r"status: (\d{3})\b", str(error))
            why = next((why for pattern, why in _REASONS.items() if re.search(pattern, str(error))), None)
            why = why or (f"HTTP status {status[1]}" if status else type(error).__name__)
            raise OSError(errno.EIO, f"the storage failed ({why})", str(self)) from None


@dataclass(frozen=True)
class ObjectStat:
    """Size and version of an object."""

    size: int
    """Bytes."""
    version: str | None
    """Entity tag, which every writing changes; None from a storage without them."""


def local(path: Path) -> Path:
    """Return `path` unless it names object storage, where only data are read in place: then raise DataError."""
    if path.parts[:1] == (PREFIX.rstrip("/"),):
        name = f"{PREFIX}{shown('/'.join(path.parts[1:]))}"
        raise DataError(f"'{name}' is in object storage, but a folder is needed: copy it with `vitpar copy {name} DIR`")
    return path


def parse_place(name: str | os.PathLike[str] | ObjectPath) -> Path | ObjectPath:
    """Return the path, or the name in object storage, that `name` is.

    Raises DataError for a malformed name, for one that was made a path, or if obstore is not installed.
    """
    if isinstance(name, ObjectPath) or not str(name).startswith(PREFIX):
        return name if isinstance(name, ObjectPath) else local(Path(name).expanduser())
    found = ObjectPath.parse(str(name))
    try:
        import obstore  # noqa: F401
    except ImportError:
        raise DataError(f"'{shown(found)}' needs obstore: pip install -e '.[s3]'") from None
    return found


class _ObjectFile(io.RawIOBase):
    """Object that is read by requests for ranges."""

    def __init__(self, path: ObjectPath) -> None:
        self._path, self._stat, self._place = path, path.stat(), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._stat.size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    @property
    def _left(self) -> int:
        return self._stat.size - self._place

    def readall(self) -> bytes:
        """Return the rest in one request; io's own asks for 8 KiB at a time."""
        data = self._path.read_range(self._place, left, self._stat.version) if (left := self._left) > 0 else b""
        self._place += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._left)
        if size <= 0:
            return 0
        data = self._path.read_range(self._place, size, self._stat.version)
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


@lru_cache(maxsize=64)
def _store(bucket: str, endpoint: str | None) -> S3Store:
    """Return the client of a bucket, which keeps connections open."""
    from obstore.store import S3Store

    silent, plain = timedelta(seconds=_SILENT_S), endpoint is not None and endpoint.startswith("http://")
    return S3Store(
        bucket,
        endpoint=endpoint,
        client_options={"timeout": silent, "connect_timeout": timedelta(seconds=10), "allow_http": plain},
        retry_config={"max_retries": 8, "retry_timeout": silent},
    )
