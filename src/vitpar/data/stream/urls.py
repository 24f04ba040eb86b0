"""URLs of shards: expand patterns, refuse URLs that may not run commands, and open them."""

import re
import select
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from vitpar.errors import DataError
from vitpar.io import open_regular
from vitpar.object_store import parse_place
from vitpar.text import shown

_COMMANDS = {"pipe": "a shell command", "gs": "the command `gsutil cat`"}
_PLAIN = ("", "file", "http", "https", "s3")
_SILENT_S = 300.0  # seconds without a byte after which a source counts as dead
_PIECE = 1 << 20  # bytes read at a time
_SLICE_MS = 200  # milliseconds between checks of whether reading was stopped
# A server may redirect only to another address of the web, not to ftp or a file.
_CURL_COMMAND = ["curl", "--proto", "=http,https", "--proto-redir", "=http,https", "--connect-timeout", "30"]
_CURL_COMMAND += ["--retry", "30", "--retry-delay", "2", "-f", "-s", "-L", "--"]
# Meanings of curl's exit codes.
_CURL = {1: "a redirect leaves the web", 6: "the host is unknown", 7: "the host does not answer"}
_CURL |= {18: "the transfer was interrupted", 28: "timeout"}
_CURL |= {22: "the server returned an error", 56: "the transfer was interrupted"}
# First bytes of gzip, bzip2, xz and zstd.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Stopped(Exception):
    """Raised to stop reading: the consumer of the stream is gone."""


def expand(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Return the URLs that brace patterns such as ``https://host/train-{000..127}.tar`` expand to.

    Raises DataError for braces that do not close.
    """
    from braceexpand import braceexpand  # the library that webdataset uses

    urls: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        try:
            urls += braceexpand(pattern, escape=False)
        except (ValueError, MemoryError, OverflowError, RecursionError):
            raise DataError(
                f"'{shown(pattern)}' has unbalanced or too many braces: write them as in train-{{000..127}}.tar"
            ) from None
    return tuple(urls)


def check(urls: Sequence[str], allow_pipe: bool) -> None:
    """Refuse URLs that cannot be opened, are given twice, or run a command although that is not allowed.

    allow_pipe: whether URLs may run commands.

    Raises DataError.
    """
    if not urls or not all(urls):
        raise DataError("a stream has an empty shard name: use URLs such as https://host/train-{000..127}.tar")
    twice = next((url for url, after in zip(sorted(urls), sorted(urls)[1:], strict=False) if url == after), None)
    if twice is not None:
        raise DataError(f"shard '{shown(twice)}' is in the stream twice: list each shard once")
    for url in urls:
        scheme = _scheme(url)
        if scheme in _COMMANDS and not allow_pipe:
            raise DataError(
                f"'{shown(url)}' runs {_COMMANDS[scheme]}, which is disabled: set stream.allow_pipe=true if you "
                "trust it"
            )
        if scheme not in (*_COMMANDS, *_PLAIN):
            raise DataError(
                f"'{shown(url)}' cannot be streamed: use http://, https://, s3://, gs://, a path, or pipe:COMMAND with "
                "a command that writes the shard"
            )
        if scheme == "s3":
            parse_place(url)  # raises


def _scheme(url: str) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", url)
    return match.group(1) if match else ""


def words(error: Exception) -> str:
    """Return the message of `error` on one line, including the name of a missing program."""
    if isinstance(error, OSError) and error.strerror:
        program = error.filename if error.filename in ("curl", "gsutil") else None
        return f"{error.strerror}{f' ({program})' if program else ''}"
    return shown(" ".join(str(error.args[0] if error.args else error).split()))


class ShardStream:
    """Open shard that is read forwards.

    url: URL of the shard, which has passed `check`.
    stopping: event that makes a waiting read raise Stopped.

    Raises OSError if the shard cannot be opened.
    """

    def __init__(self, url: str, stopping: threading.Event) -> None:
        self._place, self._url, self._stopping = 0, url, stopping
        self._poll, self._head, self._ended = select.poll(), b"", False
        self._process: subprocess.Popen[bytes] | None = None
        match _scheme(url):
            case "http" | "https":
                command: str | list[str] = [*_CURL_COMMAND, url]
            case "gs":
                command = ["gsutil", "cat", url]
            case "pipe":
                command = url.removeprefix("pipe:")
            case _:
                self._file: Any = open_regular(parse_place(re.sub(r"^file:(//)?", "", url)))
                return
        self._process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, shell=isinstance(command, str))
        self._file = self._process.stdout
        self._poll.register(self._file, select.POLLIN)

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or fewer at the end."""
        pieces = []
        while size > 0 and (piece := self._piece(min(size, _PIECE))):
            pieces.append(piece)
            size -= len(piece)
            self._place += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, place: int, /) -> int:
        """Read up to `place`, which is ahead, or to the end, and return the position reached."""
        while self._place < place and self.read(min(place - self._place, _PIECE)):
            pass
        return self._place

    def tell(self) -> int:
        """Return the number of bytes read so far."""
        return self._place

    def _piece(self, size: int) -> bytes:
        """Return at least one and at most `size` of the next bytes; none at the end.

        Raises OSError if the source sends nothing for _SILENT_S seconds.
        Raises Stopped.
        """
        waited = 0
        while self._process and not self._poll.poll(_SLICE_MS):
            waited += _SLICE_MS
            if waited > _SILENT_S * 1000:
                raise OSError(f"no data for {_SILENT_S:.0f} s")
            if self._stopping.is_set():
                raise Stopped
        data = self._file.read(size)
        if not self._place:
            self._head = data[:8]
        self._ended = not data
        return data

    def finish(self) -> None:
        """Raise OSError if the command failed. Call this after reading all of its output."""
        if reason := self._command_failed():
            raise OSError(reason)

    def reason(self, error: Exception) -> str:
        """Return a short reason for `error`, which reading raised: the failure of the command if it failed."""
        if self._head.startswith(_COMPRESSED):
            return "it is compressed; decompress it, as in pipe:curl URL | gunzip"
        return (self._command_failed() if self._ended else None) or words(error)

    def _command_failed(self) -> str | None:
        """Return why a command that has closed its output failed; None if it succeeded."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(_SILENT_S)
        except subprocess.TimeoutExpired:
            return f"its command does not end within {_SILENT_S:.0f} s"
        program = "curl" if self._url.startswith("http") else "its command"
        meaning = f" ({_CURL[status]})" if program == "curl" and status in _CURL else ""
        return f"{program} ended with exit code {status}{meaning}" if status else None

    def close(self) -> None:
        """Close the shard and kill its command, if there is one."""
        self._file.close()
        if self._process:
            self._process.kill()
            self._process.wait()
