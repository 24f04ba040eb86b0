"""Live pages: a server on loopback that answers with the page of runs as they are now.

It answers two paths, to GET and HEAD: `/` with the page, and `/version` with a text that changes when the page would.
On a board, the server of a folder, `?run=A&run=B` behind them asks for the page of these runs.
Other accounts of the machine can reach loopback, so it only reads. The name of the host is checked, since a page of a
stranger could otherwise read the report by a name that leads to 127.0.0.1.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import parse_qsl

from vitpar.errors import DataError, LaunchError
from vitpar.runs.board import BACK, board
from vitpar.runs.folder import LOG, RECENT, RunRecord, is_locked, runs_in
from vitpar.runs.page import MOST_RUNS, report

HOST = "127.0.0.1"
"""Address that the server listens on."""
SECONDS = 5.0
"""Seconds that a connection may wait for its client."""
REST = 5.0
"""A page is made again at most after this multiple of the time it took, so that a live report uses little of a core."""


@dataclass
class _Page:
    """A page that was made, and the state of the runs that it shows."""

    content: bytes = b""
    version: str = ""
    again: float = 0.0
    """Time from which it may be made again."""
    running: set[Path] = field(default_factory=set)
    """Folders of its runs that were running."""


class LiveReport(ThreadingHTTPServer):
    """Server of live pages, which has made its page once. As a context manager it closes its port at the end.

    runs: folders of the runs of a report, or the folder whose runs a board shows.
    port: 0 for any free one.
    made_by: as for ``vitpar.runs.page.report``.

    Raises LaunchError if the port cannot be used, and DataError for a run that cannot be read.
    """

    def __init__(self, runs: Sequence[Path] | Path, port: int, made_by: str = "") -> None:
        self._runs, self._made_by = runs, made_by
        self._pages: dict[str, _Page] = {}
        self._making = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on port {port}: {error.strerror}: name another one with --port, or 0 for any free one"
            ) from None
        try:
            self.page()
        except DataError:
            self.server_close()
            raise

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def run(self) -> None:
        """Serve until Ctrl-C."""
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            return

    def page(self, query: str = "") -> tuple[bytes, str]:
        """Return a page and its version. It is made again if the runs have changed and the last one is old enough.

        query: part of the address behind the question mark.

        Raises DataError for runs that cannot be read, and for a query that names none of a board.
        """
        with self._making:
            paths = self._paths(query)
            page = self._pages.setdefault(query, _Page())
            version, begun = _stamp(paths, page.running), time.monotonic()
            if version != page.version and begun >= page.again:
                newest = RECENT if isinstance(self._runs, Path) and not query else None
                records = [RunRecord(path, newest) for path in paths]
                page.running = {record.path for record in records if record.state == "running"}
                page.version = _stamp(paths, page.running)
                if newest is None:
                    text = report(records, made_by=self._made_by, version=page.version, above=BACK if query else "")
                else:
                    text = board(Path(str(self._runs)), records, made_by=self._made_by, version=page.version)
                page.content, now = text.encode(), time.monotonic()
                page.again = now + REST * (now - begun)
            return page.content, page.version

    def _paths(self, query: str) -> list[Path]:
        """Return the folders of the runs that a query asks for. Only names in the folder of a board lead to one."""
        if not isinstance(self._runs, Path):
            if query:
                raise DataError("this report has one page, without a query")
            return list(self._runs)
        there = {run.name: run.path for run in runs_in(self._runs)}
        if not query:
            return list(there.values())
        names = [value for key, value in parse_qsl(query, max_num_fields=2 * MOST_RUNS) if key == "run"]
        if not names or len(names) > MOST_RUNS or not there.keys() >= {*names}:
            raise DataError(f"name 1 to {MOST_RUNS} runs of the board, as in /?run=mine")
        return [there[name] for name in dict.fromkeys(names)]

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """Ignore clients that go away."""


def _stamp(paths: Sequence[Path], running: Collection[Path]) -> str:
    """Return a text that changes when a run comes or writes something, and when the process of a running one ends."""
    stamps = (
        f"{path.name}-{RunRecord(path).stamp()}{'-alive' * (path in running and is_locked(path / LOG))}"
        for path in sorted(paths)
    )
    return hashlib.sha256("\n".join(stamps).encode(errors="surrogateescape")).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: LiveReport
    server_version, sys_version = "vitpar", ""
    timeout = SECONDS

    def do_GET(self) -> None:
        """Answer a request for one of the two paths."""
        if self.headers.get("Host") not in {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}:
            return self._send(403, b"this server answers only to its own name\n")
        path, _, query = self.path.partition("?")
        if path not in ("/", "/version"):
            return self._send(404, b"there are only / and /version\n")
        try:
            page, version = self.server.page(query)
        except (DataError, ValueError) as error:
            return self._send(404 if query else 503, f"{error}\n".encode())
        return self._send(200, page, "text/html") if path == "/" else self._send(200, version.encode())

    do_HEAD = do_GET

    def _send(self, status: int, content: bytes, content_type: str = "text/plain") -> None:
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
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""
