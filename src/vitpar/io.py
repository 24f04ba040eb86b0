"""Read files that may be untrusted, and write files atomically."""

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vitpar.errors import UserError
from vitpar.limits import MAX_JSON_BYTES, MAX_TOML_BYTES
from vitpar.object_store import ObjectPath
from vitpar.text import shown

PathLike = str | os.PathLike[str]

_POINTER = "it is a pointer of git-lfs: run `git lfs pull`"
_PAGE = "it is a web page: fetch the file itself"
_BEGIN_OF_PAGE = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html)\b", re.IGNORECASE)


def open_regular(path: PathLike | ObjectPath, limit: int | None = None, *, pages: bool = False) -> BinaryIO:
    """Open a regular file of at most `limit` bytes, or an object of any size, for reading bytes.

    pages: whether it may be a web page.

    Raises OSError, also for anything but a regular file: a FIFO would block forever, and a device may be endless. Also
    for what stands in place of a file: a pointer of git-lfs, or a web page.
    """
    if isinstance(path, ObjectPath):
        return path.open()
    try:
        # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "it is not a valid file name") from None
    try:
        _refuse_irregular(status := os.fstat(descriptor), path)
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", os.fspath(path))
        os.set_blocking(descriptor, True)
        if (what := stand_in(os.pread(descriptor, 256, 0))) and not (pages and what is _PAGE):
            raise OSError(errno.EINVAL, what, os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def stand_in(begin: bytes) -> str | None:
    """Return what is in place of a file that begins so, and what to do, in words for a message; None for a file."""
    if begin.startswith(b"version https://git-lfs"):
        return _POINTER
    return _PAGE if _BEGIN_OF_PAGE.match(begin) else None


def stat_regular(path: PathLike) -> os.stat_result:
    """Return the status of a regular file, which readers open themselves. Raises OSError for anything else."""
    try:
        status = os.stat(path)
    except ValueError:  # the name has a NUL character or cannot be encoded
        raise OSError(errno.EINVAL, "it is not a valid file name") from None
    _refuse_irregular(status, path)
    return status


def _refuse_irregular(status: os.stat_result, path: PathLike) -> None:
    """Raise OSError unless `status` describes a regular file."""
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_bytes(path: PathLike | ObjectPath, limit: int | None = None) -> bytes:
    """Return the content of a regular file, or of an object, of at most `limit` bytes. Raises OSError."""
    if isinstance(path, ObjectPath):
        return path.read_bytes(limit)
    with open_regular(path, limit) as file:
        return file.read()


def read_text(path: PathLike, limit: int) -> str:
    """Return UTF-8 text of a regular file. Raises OSError beyond `limit` bytes, and ValueError as `decode_utf8`."""
    return decode_utf8(read_bytes(path, limit))


def user_path(text: str) -> str:
    """Return a path that a user wrote, or an option or setting `NAME=PATH`, with ~ replaced by the home folder.

    Raises UserError for a name that is not UTF-8, which the files of a run could not keep.
    """
    if not is_utf8(text):
        raise UserError(f"the name {shown(ascii(text))} is not UTF-8: rename it")
    return re.sub(r"(^|=)~(?=/|$)", lambda found: found[1] + os.path.expanduser("~"), text)


def is_utf8(text: str) -> bool:
    """Return whether `text` can be written: names of files and arguments that are not UTF-8 have surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_utf8(data: bytes, line: int = 1) -> str:
    """Return UTF-8 text from outside, without a leading byte-order mark.

    line: number of its first line.

    Raises ValueError, which names the line, for other encodings.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before, wrong = error.object[: error.start], error.object[error.start]
        number = line + before.count(b"\n")
        raise ValueError(f"line {number} is not UTF-8 (byte 0x{wrong:02x}): save it as UTF-8") from None


def read_json(path: PathLike | ObjectPath, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value in a regular file. Raises OSError beyond `limit` bytes, ValueError as `parse_json`."""
    return parse_json(read_bytes(path, limit))


def parse_json(data: bytes | str) -> Any:
    """Return the JSON value in `data`.

    Raises ValueError for invalid JSON, for text other than UTF-8, for nesting that is too deep to parse, and for half
    of a surrogate pair, which could not be written again.
    """
    text = decode_utf8(data) if isinstance(data, bytes) else data
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower() and not is_utf8(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has an unpaired surrogate")
    return value


def read_toml(path: PathLike) -> dict[str, Any]:
    """Return the content of a regular TOML file. Raises OSError, and ValueError as `parse_toml` does."""
    return parse_toml(read_text(path, MAX_TOML_BYTES))


def parse_toml(text: str) -> dict[str, Any]:
    """Return the content of TOML `text`. Raises ValueError for invalid TOML, or nesting too deep to parse."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Name `path` in an OSError of the context, as the errors of writing to an open file do not."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def write_text(path: PathLike, text: str) -> None:
    """Write UTF-8 atomically: a reader sees the old file or the complete new one. Raises OSError."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # left by a killed process
        # "x": never write through a link that somebody put there.
        with writing(target), temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, target)
    finally:
        with suppress(OSError):  # already renamed, or never created
            temporary.unlink()
