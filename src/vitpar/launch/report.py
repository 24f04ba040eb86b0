"""A worker's line to the parent that started it: it reports the error that ended it, and ends when the parent does.

A worker writes its error to a file of its own in the folder the parent named in VITPAR_REPORTS, and prints nothing. The
parent picks the root cause among all (`local.py`), so that the user sees one error once. Under torchrun a rank writes
its error for torchrun, which shows the first, and prints it too: torchrun is silent about ranks that it starts again.

A launcher holds a lock on a file in its folder for as long as it lives, so a folder whose lock can be taken is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from vitpar.errors import FaultError, UserError
from vitpar.launch.world import REPORTS

TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for the error of this rank
PARENT_PIPE = "VITPAR_PARENT_PIPE"  # file descriptor that reads end-of-file once the parent is gone

# With the name of the machine: where several share the folder, a lock may hold on its own machine alone.
PREFIX = f"vitpar-ranks-{re.sub('[^A-Za-z0-9]', '-', platform.node())[:32]}-"
_LOCK = "lock"

# How losing a peer looks like: torch's own classes, and the RuntimeErrors in which gloo and NCCL wrap a socket's error.
_PEER_LOST = ("DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionError")
_PEER_LOST_TEXT = re.compile(r"gloo/transport|Connection (closed|reset|refused)|NCCL|Timed out waiting|Broken pipe")


@dataclass(frozen=True)
class Report:
    """An error of one worker.

    time: seconds since the epoch. kind: "user" for a UserError, "fault" for a FaultError, "crash" for all else.
    peer_lost: the error only says that another rank went away, so it is no root cause.
    headline: `RuntimeError: text`, or the sentence of a UserError or FaultError. traceback: all that comes before the
    headline.
    """

    rank: int
    time: float
    kind: Literal["user", "fault", "crash"]
    peer_lost: bool
    headline: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Report:
        """The report of `error` as raised in worker `rank` now."""
        formatted = traceback.TracebackException.from_exception(error)
        headline = "".join(formatted.format_exception_only())
        kind: Literal["user", "fault", "crash"] = "fault" if isinstance(error, FaultError) else "crash"
        return cls(
            rank=rank,
            time=time.time(),
            kind="user" if isinstance(error, UserError) else kind,
            peer_lost=_is_peer_lost(error),
            headline=str(error) if isinstance(error, UserError | FaultError) else headline.strip(),
            traceback="".join(formatted.format()).removesuffix(headline),
        )

    @classmethod
    def read(cls, folder: Path, rank: int) -> Report | None:
        """Return the report of worker `rank` in `folder`, or None."""
        path = _path(folder, rank)
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def write(self, folder: Path) -> None:
        """Puts the report into `folder` in one piece: it is never seen half-written."""
        path = _path(folder, self.rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def report_failure(error: BaseException) -> bool:
    """Hands `error` to the parent, which will show it; False, doing nothing, in a process that vitpar did not start.

    After True the caller has nothing to print and should exit with a code other than 0.
    """
    folder = os.environ.get(REPORTS)
    if folder is None:
        return False
    # A folder that is gone means that the parent is gone, and no process is left to report to.
    with contextlib.suppress(FileNotFoundError):
        Report.of(error, int(os.environ["RANK"])).write(Path(folder))
    return True


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Wraps the whole program: in a worker that vitpar started, an error is reported and the process exits silently.

    Exits with 2 after a UserError, else with 1. Anywhere else errors pass through, told to torchrun where it started
    us. Of a rank that only lost another one line is printed, exit code 1, so that the cause stands out (with
    VITPAR_DEBUG set its error passes through too).
    """
    if REPORTS in os.environ:
        watch_parent()
        faulthandler.enable()
    try:
        yield
    except Exception as error:
        if report_failure(error):
            sys.exit(2 if isinstance(error, UserError) else 1)
        report = Report.of(error, int(os.environ.get("RANK", 0)))
        _tell_torchrun(report)
        if not report.peer_lost or os.environ.get("VITPAR_DEBUG"):
            raise
        print(f"rank {report.rank} lost its connection to another rank: {report.headline}", file=sys.stderr, flush=True)
        sys.exit(1)


def _tell_torchrun(report: Report) -> None:
    """Writes `report` as torchrun reads it, where torchrun started us."""
    path = os.environ.get(TORCHRUN_FILE)
    if path is None:
        return
    text = report.traceback + report.headline if report.kind == "crash" else f"error: {report.headline}"
    # torchrun takes the earliest for the cause, in whole seconds: a rank that only lost its peer comes after.
    when = int(report.time) + report.peer_lost
    data = {"message": report.headline, "extraInfo": {"py_callstack": text, "timestamp": str(when)}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": data}))


def watch_parent() -> None:
    """In a worker that vitpar started: ends this process and its children once the parent is gone. Else nothing."""
    pipe = os.environ.pop(PARENT_PIPE, None)  # popped: the descriptor means nothing to our own children
    if pipe is None:
        return

    def wait_for_end() -> None:
        os.read(int(pipe), 1)
        shutil.rmtree(os.environ[REPORTS], ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="watch-parent", daemon=True).start()


def _is_peer_lost(error: BaseException | None) -> bool:
    if error is None:
        return False
    classes = {cls.__name__ for cls in type(error).__mro__}
    if not classes.isdisjoint(_PEER_LOST):
        return True
    # gloo's errors and NCCL's are plain RuntimeErrors, so only their text tells.
    if type(error) is RuntimeError and _PEER_LOST_TEXT.search(str(error)):
        return True
    return _is_peer_lost(error.__cause__)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


@contextlib.contextmanager
def reports_folder() -> Iterator[Path]:
    """Make an empty folder that only this user can enter, and remove it in the end. First removes those left behind."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with open(folder / f".{_LOCK}", "xb") as file:
            with contextlib.suppress(OSError):  # where a file system has no locks, folders that are left stay
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Only now under the name that others look for: they never see it without its lock.
                os.rename(folder / f".{_LOCK}", folder / _LOCK)
            yield folder


def remove_left() -> None:
    """Remove this user's folders in the temporary folder whose launchers are gone. Follows no link, raises nothing."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where its launcher lives
        shutil.rmtree(entry.path)
    finally:
        os.close(lock)
