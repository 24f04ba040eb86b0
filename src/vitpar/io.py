"""Reads files that somebody else may have made, and writes files that are there whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from vitpar.limits import MAX_JSON_BYTES, MAX_TOML_BYTES, MAX_TOML_DOTS

PathLike = str | os.PathLike[str]

_TOML_TEXT = re.compile(
    r"""
    \"""(?: \\. | [^"\\] | "(?!"") )*+ "{0,5}      # of several lines
    | \'\'\'(?: [^'] | '(?!'') )*+ '{0,5}
    | "(?: \\. | [^"\\\n] )*+ "?
    | '[^'\n]*+ '?
    | \#[^\n]*+
    """,
    re.DOTALL | re.VERBOSE,
)
"""Strings and comments of TOML, also those that do not end."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_JSON_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F])|.)", re.DOTALL
)
"""Escapes in JSON. Group 1: half of a surrogate pair without the other."""


def open_regular(path: PathLike) -> BinaryIO:
    """Open a regular file for reading bytes.

    Raises OSError, also for anything else: a FIFO would be waited for without end, and a device may have no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO opens at once, to be refused
    except ValueError:
        raise OSError(errno.EINVAL, "it is no name of a file") from None
    try:
        _refuse_irregular(os.fstat(descriptor), path)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def stat_regular(path: PathLike) -> os.stat_result:
    """Return the status of a regular file, for readers that open `path` themselves. Raises OSError, also for anything
    else."""
    try:
        found = os.stat(path)
    except ValueError:  # a name with a zero in it, or that cannot be encoded
        raise OSError(errno.EINVAL, "it is no name of a file") from None
    _refuse_irregular(found, path)
    return found


def _refuse_irregular(found: os.stat_result, path: PathLike) -> None:
    """Raise OSError unless `found` describes a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_bytes(path: PathLike, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises OSError."""
    with open_regular(path) as file:
        large = os.fstat(file.fileno()).st_size > limit
        data = b"" if large else file.read(limit + 1)
    if large or len(data) > limit:  # a file of /proc has no size
        raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", os.fspath(path))
    return data


def read_text(path: PathLike, limit: int) -> str:
    """Return the UTF-8 text in a regular file of at most `limit` bytes. Raises OSError, and ValueError for other
    encodings."""
    return read_bytes(path, limit).decode("utf-8")


def read_json(path: PathLike, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON value in a regular file of at most `limit` bytes. Raises OSError, and ValueError as `parse_json`
    does."""
    return parse_json(read_bytes(path, limit))


def parse_json(data: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Return the JSON value that `data` holds. pairs: makes an object of its keys and values, a dict by default.

    Raises ValueError for what is not JSON, also where it is nested too deeply to be read, and for text that cannot be
    written again: half of a surrogate pair.
    """
    text = data.decode(json.detect_encoding(data)) if isinstance(data, bytes) else data
    if _SURROGATE.search(text) and any(match[1] for match in _JSON_ESCAPE.finditer(text)):
        raise ValueError("it has half of a surrogate pair")
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: PathLike) -> dict[str, Any]:
    """Return what a regular file of TOML holds. Raises OSError, and ValueError as `parse_toml` does."""
    return parse_toml(read_text(path, MAX_TOML_BYTES))


def parse_toml(text: str) -> dict[str, Any]:
    """Return what TOML `text` holds.

    Raises ValueError for what is not TOML, also where it is nested too deeply to be read.
    """
    # Reading a key takes the square of its dots. Between two of these signs there is at most one key.
    longest = max(piece.count(".") for piece in re.split(r"[\n=\[\]{},]", _TOML_TEXT.sub("", text)))
    if longest > MAX_TOML_DOTS:
        raise ValueError(f"a key has {longest:,} dots, and at most {MAX_TOML_DOTS} are read")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_text(path: PathLike, text: str) -> None:
    """Write `text` to `path` as UTF-8. A reader sees the old file or the whole new one. Raises OSError."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of a process that was killed
        with temporary.open("x", encoding="utf-8") as file:  # through no link that somebody put there
            file.write(text)
        os.replace(temporary, target)
    finally:
        with suppress(OSError):  # already renamed, or never made
            temporary.unlink()
