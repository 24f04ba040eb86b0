"""Reports of worker errors to the launching process, and the end of workers whose launcher is gone.

A worker writes its error to its own file in the folder that the parent named in VITPAR_REPORTS, and prints nothing. The
parent picks the root cause among all (`local.py`), so the user sees one error once. Under torchrun a rank writes its
error to torchrun's file, of which torchrun shows the first, and also prints it: torchrun is silent about ranks that it
restarts.

A launcher holds a lock on a file in its folder while it lives. A folder whose lock can be taken is left over.
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
from typing import Literal, NoReturn

from vitpar.errors import FaultError, UserError
from vitpar.launch.world import REPORTS
from vitpar.terminal import complain

TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun looks for the error of this rank."""
PARENT_PIPE = "VITPAR_PARENT_PIPE"
"""Environment variable with the file descriptor that reads end-of-file once the parent is gone."""

# Contains the name of the machine: if several machines share the folder, locks may work only within one machine.
PREFIX = f"vitpar-ranks-{re.sub('[^A-Za-z0-9]', '-', platform.node())[:32]}-"
_LOCK = "lock"

# Errors of a lost peer: torch's own classes, and RuntimeErrors in which gloo and NCCL wrap a socket's error.
_PEER_LOST = ("DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionError")
_PEER_LOST_TEXT = re.compile(r"gloo/transport|Connection (closed|reset|refused)|NCCL|Timed out waiting|Broken pipe")


@dataclass(frozen=True)
class Report:
    """Error of a worker."""

    rank: int
    """Rank of the worker."""
    time: float
    """Seconds since the epoch."""
    kind: Literal["user", "fault", "crash"]
    """"user" for a UserError, "fault" for a FaultError, "crash" for anything else."""
    peer_lost: bool
    """Whether the error only says that another rank went away, so that it is no root cause."""
    headline: str
    """`RuntimeError: text`, or the sentence of a UserError or FaultError."""
    traceback: str
    """Formatted traceback up to the headline."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Report:
        """Return the report of `error`, raised now in worker `rank`."""
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
        """Return the report of worker `rank` in `folder`; None if there is none."""
        path = _path(folder, rank)
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def write(self, folder: Path) -> None:
        """Write the report to `folder` atomically."""
        path = _path(folder, self.rank)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)


def report_failure(error: BaseException) -> bool:
    """Report `error` to the parent, which will show it. Return whether vitpar started this process; if not, do nothing.

    After True the caller has nothing to print and should exit with a code other than 0.
    """
    folder = os.environ.get(REPORTS)
    if folder is None:
        return False
    # A folder that is gone means that the parent is gone, and no process is left to report to.
    with contextlib.suppress(FileNotFoundError):
        Report.of(error, int(os.environ["RANK"])).write(Path(folder))
    return True


def finish(code: int) -> NoReturn:
    """End this rank, whose work is done, with exit code `code`, without the shutdown of Python and libraries.

    At shutdown, threads of torch and gloo may abort the process or wait for each other, so that a successful run seems
    to have failed, and the cause of a failure has noise before it (upstream: seen on torch 2.13, once in hundreds of
    runs: "terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Report errors of the program inside the block.

    In a worker that vitpar started, an error is reported and the process exits silently: with 2 after a UserError, else
    with 1. Elsewhere errors pass through, after they are written for torchrun if that started us. A rank that only lost
    another prints one line and exits with 1, so that the cause stands out; with VITPAR_DEBUG set, its error passes
    through too.
    """
    if REPORTS in os.environ:
        watch_parent()
        faulthandler.enable()
    try:
        yield
    except Exception as error:
        if report_failure(error):
            finish(2 if isinstance(error, UserError) else 1)
        report = Report.of(error, int(os.environ.get("RANK", 0)))
        _tell_torchrun(report)
        if not report.peer_lost or os.environ.get("VITPAR_DEBUG"):
            raise
        complain(f"rank {report.rank} lost its connection to another rank: {report.headline}")
        sys.exit(1)


def _tell_torchrun(report: Report) -> None:
    """Write `report` in the format of torchrun, if torchrun started us."""
    path = os.environ.get(TORCHRUN_FILE)
    if path is None:
        return
    if threading.current_thread() is threading.main_thread():
        # torchrun sends SIGTERM to all ranks when the first exits: print, and exit with this rank's own code.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    text = report.traceback + report.headline if report.kind == "crash" else f"error: {report.headline}"
    # torchrun takes the earliest error for the cause, in whole seconds: a rank that only lost a peer, and one that
    # torchrun ended before it could report, must come later.
    when = int(report.time) - (not report.peer_lost)
    data = {"message": report.headline, "extraInfo": {"py_callstack": text, "timestamp": str(when)}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": data}))


def watch_parent() -> None:
    """End this process and its children once the parent is gone. Does nothing unless vitpar started this process."""
    pipe = os.environ.pop(PARENT_PIPE, None)  # popped: our own children do not have the descriptor
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
    # Errors of gloo and NCCL are plain RuntimeErrors, so only their text identifies them.
    if type(error) is RuntimeError and _PEER_LOST_TEXT.search(str(error)):
        return True
    return _is_peer_lost(error.__cause__)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


@contextlib.contextmanager
def reports_folder() -> Iterator[Path]:
    """Yield an empty folder that only this user can enter, and remove it at the end. Removes abandoned ones first."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with open(folder / f".{_LOCK}", "xb") as file:
            with contextlib.suppress(OSError):  # without locks in the file system, abandoned folders stay
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Renamed after locking, so that others never see the file unlocked.
                os.rename(folder / f".{_LOCK}", folder / _LOCK)
            yield folder


def remove_left() -> None:
    """Remove this user's report folders whose launchers are gone from the temporary folder.

    Follows no link, raises nothing.
    """
    with contextlib.suppress(OSError):
        for entry in os.scandir(tempfile.gettempdir()):
            if entry.name.startswith(PREFIX):
                with contextlib.suppress(OSError):
                    _remove_if_left(entry)


def _remove_if_left(entry: os.DirEntry[str]) -> None:
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its launcher lives
        shutil.rmtree(entry.path)
    finally:
        os.close(lock)
