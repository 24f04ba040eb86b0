"""Reports of worker errors to the launching process, and the end of workers whose launcher is gone.

A rank writes its error to the file that its launcher names, in the format of torchrun. A rank that vitpar started
prints nothing: the parent picks the root cause among all (`local.py`), so the user sees one error once. Under torchrun,
which shows the first error, a rank also prints it, since torchrun is silent about ranks that it restarts.
"""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, Self

from vitpar.errors import FaultError, UserError
from vitpar.launch.world import REPORTS
from vitpar.terminal import complain

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file in which torchrun or vitpar looks for the error of this rank."""

# Errors of a lost peer: torch's own classes, and RuntimeErrors in which gloo and NCCL wrap a socket's error.
_PEER_LOST = ("DistNetworkError", "DistStoreError", "DistBackendError", "ConnectionError")
_PEER_LOST_TEXT = re.compile(r"gloo/transport|Connection (closed|reset|refused)|NCCL|Timed out waiting|Broken pipe")


class Report(NamedTuple):
    """Error of a worker."""

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
    def of(cls, error: BaseException) -> Self:
        """Return the report of `error`, raised now."""
        formatted = traceback.TracebackException.from_exception(error)
        headline = "".join(formatted.format_exception_only())
        before = "".join(formatted.format()).removesuffix(headline)
        if isinstance(error, UserError | FaultError):
            return cls(time.time(), "user" if isinstance(error, UserError) else "fault", False, str(error), before)
        return cls(time.time(), "crash", _is_peer_lost(error), headline.strip(), before)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Return the report in the file `path`; None if there is none."""
        return cls(*json.loads(path.read_text())["message"]["report"]) if path.exists() else None

    def write(self, path: Path) -> None:
        """Write the report to `path` atomically, as torchrun reads it."""
        text = self.traceback + self.headline if self.kind == "crash" else f"error: {self.headline}"
        # torchrun takes the earliest error for the cause, in whole seconds: a rank that only lost a peer, and one that
        # torchrun ended before it could report, must come later.
        extra = {"py_callstack": text, "timestamp": str(int(self.time) - (not self.peer_lost))}
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"message": {"message": self.headline, "extraInfo": extra, "report": self}}))
        part.replace(path)


def report_failure(error: BaseException) -> bool:
    """Report `error` to the launcher. Return whether vitpar started this process, so that its parent shows the error.

    After True the caller has nothing to print and should exit with a code other than 0.
    """
    if ERROR_FILE in os.environ:
        if threading.current_thread() is threading.main_thread():
            # A launcher sends SIGTERM to all ranks when the first exits: end with this rank's own words and code.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with contextlib.suppress(OSError):  # the folder of a launcher that is gone
            Report.of(error).write(Path(os.environ[ERROR_FILE]))
    return REPORTS in os.environ


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
        faulthandler.enable(all_threads=False)  # the launcher shows the end of the log
    try:
        yield
    except Exception as error:
        if report_failure(error):
            finish(2 if isinstance(error, UserError) else 1)
        if not _is_peer_lost(error) or os.environ.get("VITPAR_DEBUG"):
            raise
        rank, words = os.environ.get("RANK", 0), Report.of(error).headline
        complain(f"rank {rank} lost its connection to another rank: {words}")
        sys.exit(1)


@cache
def watch_parent() -> None:
    """End this process and its children once the parent is gone. Does nothing unless vitpar started this process."""
    if REPORTS not in os.environ:
        return

    def wait_for_end() -> None:
        os.read(0, 1)  # the parent holds the other end of stdin, and never writes
        shutil.rmtree(os.environ[REPORTS], ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait_for_end, name="watch-parent", daemon=True).start()


def _is_peer_lost(error: BaseException | None) -> bool:
    if error is None:
        return False
    classes = {cls.__name__ for cls in type(error).__mro__}
    # Errors of gloo and NCCL are plain RuntimeErrors, so only their text identifies them.
    of_gloo = type(error) is RuntimeError and _PEER_LOST_TEXT.search(str(error))
    return not classes.isdisjoint(_PEER_LOST) or bool(of_gloo) or _is_peer_lost(error.__cause__)
