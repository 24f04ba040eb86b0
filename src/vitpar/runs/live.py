"""Live report: a server on loopback that answers with the page of runs as they are now.

It answers two paths, to GET and HEAD: `/` with the page, and `/version` with a text that changes when the page would.
Other accounts of the machine can reach loopback, so connections are few, short and read-only. The name of the host is
checked, since a page of a stranger could otherwise read the report by a name that leads to 127.0.0.1.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any

from vitpar.errors import DataError, LaunchError
from vitpar.runs.folder import LOG, RunRecord, is_locked
from vitpar.runs.page import report

HOST = "127.0.0.1"
"""Address that the server listens on."""
CONNECTIONS = 8
"""Maximum number of connections that are served at a time; a further one ends the oldest."""
SECONDS = 5.0
"""Seconds that a connection may wait for its client."""
REST = 5.0
"""A page is made again at most after this multiple of the time it took, so that a live report uses little of a core."""


class LiveReport(ThreadingHTTPServer):
    """Server of a live report. As a context manager it closes its port at the end.

    runs: folders of the runs.
    port: 0 for any free one.
    made_by: as for ``vitpar.runs.page.report``.

    Raises LaunchError if the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: Sequence[Path], port: int, made_by: str = "") -> None:
        self._runs, self._made_by = tuple(runs), made_by
        self._page, self._version, self._again = b"", "", 0.0
        self._running: set[Path] = set()
        self._making = threading.Lock()
        self._open: list[Any] = []  # connections, the oldest first
        self._changing = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on port {port}: {error.strerror}: name another one with --port, or 0 for any free one"
            ) from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of this server in requests."""
        return tuple(f"{name}:{self.server_port}" for name in (HOST, "localhost"))

    def run(self) -> None:
        """Serve until Ctrl-C."""
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            return

    def page(self) -> tuple[bytes, str]:
        """Return the page and its version. It is made again if the runs have changed and the last one is old enough."""
        with self._making:
            version = self._stamp()
            begun = time.monotonic()
            if version != self._version and begun >= self._again:
                records = [RunRecord(path) for path in self._runs]
                self._running = {record.path for record in records if record.state == "running"}
                version = self._stamp()
                self._page = report(records, made_by=self._made_by, version=version).encode()
                self._version, now = version, time.monotonic()
                self._again = now + REST * (now - begun)
            return self._page, self._version

    def _stamp(self) -> str:
        """Return a text that changes when a run writes something, and when the process of a running one has ended."""
        alive = self._running
        return "-".join(
            f"{RunRecord(path).stamp()}{'-alive' * (path in alive and is_locked(path / LOG))}" for path in self._runs
        )

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread. If there are too many, the oldest is ended, whose client is slow."""
        with self._changing:
            if len(self._open) >= CONNECTIONS:
                with suppress(OSError):
                    self._open.pop(0).shutdown(SHUT_RDWR)
            self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was served."""
        with self._changing, suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Ignore clients that go away."""


def serve(runs: Sequence[Path], port: int, made_by: str = "") -> LiveReport:
    """Return the server of a live report, after making its page once.

    Raises LaunchError if the port cannot be used, and DataError for a run that cannot be read.
    """
    server = LiveReport(runs, port, made_by)
    try:
        server.page()
    except DataError:
        server.server_close()
        raise
    return server


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: LiveReport
    server_version, sys_version = "vitpar", ""
    timeout = SECONDS

    def do_GET(self) -> None:
        """Answer a request for one of the two paths."""
        self._answer(self.command == "GET")

    do_HEAD = do_GET

    def _answer(self, body: bool) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            return self._send(403, b"this server answers only to its own name\n", "text/plain", body)
        if self.path not in ("/", "/version"):
            return self._send(404, b"there are only / and /version\n", "text/plain", body)
        try:
            page, version = self.server.page()
        except DataError as error:
            return self._send(503, f"{error}\n".encode(), "text/plain", body)
        if self.path == "/":
            return self._send(200, page, "text/html", body)
        return self._send(200, version.encode(), "text/plain", body)

    def _send(self, status: int, content: bytes, content_type: str, body: bool) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{content_type}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
