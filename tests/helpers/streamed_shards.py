"""Small tar shards of known samples, and a web server for them."""

import functools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from webdataset import TarWriter

from helpers.tiny_images import saved

SIDE = 10


def write_shards(folder: Path, split: str, sizes: Sequence[int], classes: int | None = None) -> int:
    """Write `sizes[i]` images into `folder`/`split`-<i>.tar for each i, and return the total number of images.

    classes: None for noise images whose label is their number. Otherwise the number of classes, which uniform images
    take in turn; their brightness is `brightness(label, classes)`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, size in enumerate(sizes):
        with TarWriter(str(folder / f"{split}-{shard}.tar")) as writer:
            for _ in range(size):
                label = number if classes is None else number % classes
                draws = np.random.default_rng(number)
                pixels = draws.integers(0, 256, (SIDE, SIDE, 3)) if classes is None else np.zeros((SIDE, SIDE, 3))
                if classes is not None:
                    pixels += brightness(label, classes)
                writer.write({"__key__": f"{number:04d}", "png": saved(pixels), "cls": str(label).encode()})
                number += 1
    return number


def brightness(label: int, classes: int) -> int:
    """Return the brightness of a class's uniform images, 0 to 255."""
    return round(255 * (label + 0.5) / classes)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        """Serve a file. `/cut/FILE` announces the length of FILE but sends only half of it."""
        if not self.path.startswith("/cut/"):
            return super().do_GET()
        data = (Path(self.directory) / self.path.removeprefix("/cut/")).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.close_connection = True


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of `folder` over HTTP, and yield the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """Send `content`, a complete HTTP answer or anything else, to every client, and yield the address."""

    def answer() -> None:
        with suppress(OSError):
            while True:
                with server.accept()[0] as client, suppress(OSError):  # the client may close the connection
                    client.settimeout(5)
                    client.recv(4096)
                    client.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)  # ends `accept`
            thread.join()
