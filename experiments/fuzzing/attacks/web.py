"""Hostile web server on this machine, and its answers."""

from __future__ import annotations

import gzip
import random
import socket
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzzing.attacks import tar_headers
from fuzzing.attacks.images import zeros

CHUNK = bytes(1 << 16)
PAUSE_S = 60.0
MANY_BYTES = 30 << 20
Step = bytes | float
"""Bytes to send, or seconds to wait."""


@dataclass(frozen=True)
class Answer:
    """Answer of the server."""

    steps: tuple[Step, ...]
    """Bytes and pauses, in order."""
    endless: bytes = b""
    """Bytes to send repeatedly after the steps."""
    rude: bool = False
    """Whether to reset the connection at the end."""
    honest: bool = True
    """Whether a reader that accepts the answer must have read exactly the shard."""


class Server:
    """Server that sends `answer` to every request."""

    def __init__(self) -> None:
        self.answer = Answer(())
        self._stopping = threading.Event()
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                outer._handle(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.daemon_threads, self._server.allow_reuse_address = True, True
        self._server.server_bind()
        self._server.server_activate()
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client has closed the connection
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        """Port that the server listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop the server."""
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, connection: socket.socket) -> None:
        answer, asked = self.answer, b""
        connection.settimeout(5)
        while b"\r\n\r\n" not in asked:
            data = connection.recv(4096)
            if not data:
                return
            asked += data
        for step in answer.steps:
            if isinstance(step, float):
                self._stopping.wait(step)
            else:
                connection.sendall(step)
        while answer.endless and not self._stopping.is_set():
            connection.sendall(answer.endless)
        if answer.rude:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def head(status: str = "200 OK", length: int | str | None = None, *lines: str) -> bytes:
    """Return the status line and headers of an answer."""
    said = [
        f"HTTP/1.1 {status}",
        *([] if length is None else [f"Content-Length: {length}"]),
        "Connection: close",
        *lines,
    ]
    return "\r\n".join(said).encode("latin1") + b"\r\n\r\n"


def answers(draw: random.Random, shard: bytes, canary: Path) -> tuple[Answer, str]:
    """Return a random answer to a request for a shard, and its description.

    canary: local file that a redirect points to and that must never be read.
    """
    made = list(_answers(draw, shard, canary))
    return draw.choice(made)


def _answers(draw: random.Random, shard: bytes, canary: Path) -> Iterator[tuple[Answer, str]]:
    cut = draw.randrange(len(shard))
    whole = head(length=len(shard))
    yield Answer((whole, shard)), "right"
    yield Answer((whole, shard[:cut], 0.2, shard[cut:])), "right, with a pause"
    yield Answer((head(), shard)), "right, without a length"
    chunked = (
        b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (shard[:cut], shard[cut:]) if part) + b"0\r\n\r\n"
    )
    yield Answer((head("200 OK", None, "Transfer-Encoding: chunked"), chunked)), "right, in chunks"
    for said in (chunked[:cut], b"ffffffffffffffff\r\n" + shard, b"-1\r\n" + shard, b"zz\r\n" + shard, chunked[:-7]):
        yield Answer((head("200 OK", None, "Transfer-Encoding: chunked"), said)), "chunks that lie"
    yield Answer((whole, shard[:cut])), "cut short"
    yield Answer((whole, shard[:cut]), rude=True), "cut short by a reset"
    yield Answer((head(), shard[:cut])), "cut short, without a length"
    for length in (0, 1, cut, len(shard) - 1, len(shard) + 1, 1 << 40, -1, "9" * 100, "x", ""):
        yield Answer((head(length=length), shard)), f"length {length!s:.10}"
    yield Answer((head("200 OK", 5, f"Content-Length: {len(shard)}"), shard)), "two lengths"
    yield Answer((head(), shard), endless=CHUNK, honest=False), "endless zeros after the end"
    yield Answer((head(),), endless=CHUNK, honest=False), "endless zeros"
    yield Answer((head(), tar_headers.header(b"0.png", 1 << 40)), endless=CHUNK, honest=False), "an endless image"
    yield Answer((head(), tar_headers.header(b"x", 1 << 40, b"L")), endless=CHUNK, honest=False), "an endless name"
    yield Answer((head(), tar_headers.header(b"x.txt", (1 << 33) - 1)), endless=CHUNK, honest=False), "an endless file"
    sample = shard[: 512 * ((len(shard) // 512 - 20) // 2)] or shard[:1024]
    yield Answer((head(),), endless=sample * 20, honest=False), "endless members"
    often = shard[:-1024] * max(1, MANY_BYTES // len(shard)) + tar_headers.END
    yield Answer((head(), often), honest=False), "the same samples again and again"
    bomb = b"\x1f\x8b\x08\0\0\0\0\0\2\xff" + zeros()[2:-4]
    yield Answer((head(length=len(bomb)), bomb)), "a gzip bomb"
    yield Answer((head("200 OK", len(bomb), "Content-Encoding: gzip"), bomb)), "an encoded gzip bomb"
    packed = gzip.compress(shard, mtime=0)
    yield Answer((head("200 OK", len(packed), "Content-Encoding: gzip"), packed)), "an encoded shard"
    yield Answer((head("200 OK", len(shard), "Content-Encoding: br"), shard)), "an encoding that is none"
    for place in (
        f"file://{canary}",
        "/again.tar",
        "gopher://127.0.0.1/",
        "ftp://127.0.0.1:1/x",
        "http://127.0.0.1:1/",
        "//",
        "",
    ):
        for status in ("301 Moved", "302 Found", "307 Temporary", "308 Permanent"):
            yield Answer((head(status, 0, f"Location: {place}"),)), f"redirect to {place}"
    yield Answer((head("302 Found", 0, "Location: data:,x"),)), "redirect to data"
    for status in ("404 Not Found", "403 Forbidden", "410 Gone", "204 No Content", "206 Partial", "304 Not Modified"):
        yield Answer((head(status, len(shard)), shard), honest=status[0] == "2"), status
    for status in ("500 Internal Server Error", "503 Service Unavailable", "429 Too Many Requests", "408 Timeout"):
        yield Answer((head(status, 0, "Retry-After: 3600"),)), status
    for said in (
        b"",
        b"\0" * 2000,
        b"HTTP/9.9 999\r\n\r\n" + shard,
        b"HTTP/1.1 -1 x\r\n\r\n",
        draw.randbytes(3000),
        b"SSH-2.0-x\r\n",
    ):
        yield Answer((said,)), "no web server"
    yield Answer((shard,), honest=False), "no head at all"
    yield Answer((b"HTTP/1.1 200 OK\r\n",), endless=b"X-A: b\r\n" * 500), "endless head"
    yield Answer((b"HTTP/1.1 200 OK\r\nX: ",), endless=b"x" * (1 << 16)), "an endless line"
    yield (
        Answer((b"HTTP/1.1 100 Continue\r\n\r\n",), endless=b"HTTP/1.1 100 Continue\r\n\r\n" * 500),
        "continue for ever",
    )
    yield Answer((PAUSE_S,)), "silent"
    yield Answer((whole, PAUSE_S)), "silent after the head"
    yield Answer((whole, shard[:cut], PAUSE_S)), "silent in the middle"
    yield Answer((whole, shard[:-1], PAUSE_S)), "silent before the last byte"
    yield Answer((head("200 OK", len(shard), "Set-Cookie: a=" + "x" * 100_000), shard)), "a large cookie"
