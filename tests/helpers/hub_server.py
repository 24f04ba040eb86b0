"""A server on loopback with the parts of the Hugging Face hub's API that downloads of models use."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""Commit of the main branch of every repository."""


class Hub:
    """Repositories that a server offers.

    repos: content of the files of each repository.
    """

    def __init__(self, repos: Mapping[str, dict[str, bytes]]) -> None:
        self.repos = dict(repos)
        self.refused: dict[str, tuple[int, str]] = {}
        """HTTP status and code of the error for repositories that may not be read."""
        self.claimed: dict[str, int] = {}
        """Sizes that the server states instead of the true ones, by file."""
        self.commit: object = COMMIT
        """Commit that listings state."""
        self.headers: dict[str, str] = {}
        """Headers of files that replace the usual ones."""
        self.moved: str | None = None
        """Place to which requests for files are redirected, before `/OWNER/NAME/…`."""
        self.entry: dict[str, object] = {}
        """Metadata of every file in listings, in addition to the usual."""
        self.requests: list[str] = []
        """Method and path of each request so far."""
        self.url = ""

    def size(self, file: str, content: bytes) -> int:
        return self.claimed.get(file, len(content))


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.removeprefix("/moved").strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = "/".join(parts[2:4] if api else parts[:2]), parts[4:] if api else parts[2:]
        if repo in self.hub.refused:
            return self._refuse(*self.hub.refused[repo])
        if repo not in self.hub.repos:
            return self._refuse(404, "RepoNotFound")
        files = self.hub.repos[repo]
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        if api and rest[:1] == ["tree"]:
            return self._send(json.dumps([self._entry(name, data) for name, data in files.items()]).encode(), body)
        if api:
            siblings = [
                {"rfilename": name, "size": self.hub.size(name, data), **self.hub.entry} for name, data in files.items()
            ]
            return self._send(json.dumps({"id": repo, "sha": self.hub.commit, "siblings": siblings}).encode(), body)
        if (name := "/".join(rest[2:])) not in files:
            return self._refuse(404, "EntryNotFound")
        if self.hub.moved is not None and not path.startswith("/moved"):
            return self._send(b"", body, status=302, Location=f"{self.hub.moved}{path}", **self.hub.headers)
        tag = hashlib.sha1(files[name]).hexdigest()
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT} | self.hub.headers
        return self._send(files[name], body, **headers)

    def _entry(self, name: str, data: bytes) -> dict[str, object]:
        return {
            "type": "file",
            "path": name,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
            **self.hub.entry,
        }

    def _send(self, content: bytes, body: bool, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` at its `url` while the context lasts."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: str) -> None:
    """Make huggingface_hub, which may be imported already, ask the server at `url` and keep files in `cache`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
