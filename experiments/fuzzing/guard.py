"""Limits of a worker, and detection of forbidden actions during a case.

Memory is the kernel's peak of resident memory during a case, minus the resident memory before it. Far above the limit,
allocations fail, which protects the machine. Started programs are detected in two ways: by Python's audit events, and
by stubs in the first folder of PATH. These have the names of shells and of programs that image libraries start, and
write a file when they run.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from fuzzing.oracle import READERS, Finding, short

SECONDS = 5.0
"""Time limit of a case."""
MIB = 1 << 20
BYTES = 1 << 30
"""Memory limit of a case."""
GUARD = 3 * BYTES + BYTES // 2
"""Bytes of address space that a worker may use beyond its use when the target is loaded."""
STUBS = ("gs", "gswin64c", "sh", "bash", "aws", "gsutil", "convert", "magick", "ffmpeg", "python", "python3")
CANARY = "canary-that-no-reader-may-open"
_STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.forkpty",
    "pty.spawn",
)
_CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
_CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
_LOCAL = ("127.0.0.1", "localhost")


def add_stubs(folder: Path) -> Path:
    """Write stubs to `folder`, put it first in PATH, and return the file that a stub writes when it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder.parent / "stubs-that-ran"
    for name in STUBS:
        stub = folder / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >> "{note}"\n')
        stub.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return note


def limit_address_space() -> None:
    """Limit the address space to GUARD bytes above the current use, so that larger allocations fail."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + GUARD, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def reset_peak() -> int:
    """Reset the peak of resident memory and return the current value in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak of resident memory since the last reset, in bytes."""
    return status("VmHWM")


def status(key: str) -> int:
    """Return an entry of /proc/self/status in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


class Watch:
    """Audit hook that records started programs, access to files outside the folder of the case, and connections.

    note: file that the stubs write.
    """

    def __init__(self, note: Path) -> None:
        self._note, self._on, self._seen = note, threading.local(), set[Finding]()
        self._inside: Path | None = None
        self._programs: tuple[str, ...] = ()
        sys.addaudithook(self._told)

    @contextmanager
    def over(self, place: Path, programs: tuple[str, ...]) -> Iterator[list[Finding]]:
        """Watch the ``with`` block. The list that it yields holds the findings after the block.

        place: folder of the case. programs: programs that may be started; if there are any, connections to this machine
        are allowed too.
        """
        self._seen.clear()
        self._inside, self._programs = place.resolve(), programs
        found: list[Finding] = []
        try:
            yield found
        finally:
            self._inside = None
            found += sorted(self._seen, key=str)
            if self._note.exists():
                words = self._note.read_text(errors="replace").strip()
                self._note.unlink()
                found.append(Finding("program", f"stub {words.split(' ')[0]}", "?", f"a program ran: {words[:500]}"))

    def _told(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside is None or getattr(self._on, "busy", False):
            return
        self._on.busy = True
        try:
            if problem := self._problem(event, arguments):
                kind, words = problem
                self._seen.add(Finding(kind, words.split(" ")[0], _asked_by(), words))
        finally:
            self._on.busy = False

    def _problem(self, event: str, arguments: tuple[Any, ...]) -> tuple[str, str] | None:
        if event in _STARTS:
            command = arguments[0] if arguments else "?"
            if event == "subprocess.Popen" and os.path.basename(str(command)) in self._programs:
                return None
            return "program", f"{event} of {arguments[:2]!r:.300}"
        if event in _CONNECTS:
            host = arguments[1] if event == "socket.connect" else arguments[0]
            host = host[0] if isinstance(host, tuple) and host else host
            return None if self._programs and host in _LOCAL else ("place", f"{event} to {host!r:.200}")
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or path is None:
                return None
            if os.fsdecode(path).endswith(CANARY):
                return "place", "opened a file that has nothing to do with the case"
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            return self._outside("wrote", path) if writes else None
        if event in _CHANGES:
            return self._outside(event, arguments[0])
        return None

    def _outside(self, event: str, path: Any) -> tuple[str, str] | None:
        if isinstance(path, int):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        assert self._inside is not None
        usual = ("/dev/", "/proc/")
        if whole.startswith((f"{self._inside}", *usual)) or "__pycache__" in whole:
            return None
        return "place", f"{event} {whole!r:.300}, outside the folder of the case"


def _asked_by() -> str:
    """Return file:line of the innermost frame of vitpar on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(str(READERS)):
        frame = frame.f_back
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"
