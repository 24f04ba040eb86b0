"""Local launcher: start the ranks of one machine, watch them, and report an error once.

    parent ── TCPStore on loopback (where the ranks meet), pipe (end-of-file = parent gone), folder of reports
      ├── rank 0   own session, the user's stdout and stderr
      ├── rank 1   own session, output to <folder>/rank1.log
      └── …

The first rank that fails ends all. Its peers then fail as well, with errors that only say that a connection was closed.
The launcher therefore looks for the root cause among all failures (`_Failure.order`).
docs/design.md says why this is not torch's elastic agent.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Self

from vitpar.io import writing
from vitpar.launch.report import ERROR_FILE, Report
from vitpar.launch.resources import allow_open_files, cpu_share
from vitpar.launch.stop_request import SAVED, StopRequest, signal_words
from vitpar.launch.world import HANDED, LOOPBACK, REPORTS
from vitpar.terminal import complain, is_terminal

POLL = 0.02
"""Seconds between two polls of the workers."""
CONFIRM = 0.1
"""Seconds to wait after a failure, since an earlier one may still be reported."""
SETTLE = 1.0
"""Seconds to wait while only symptoms are known: peers that lost a connection, exit codes without a report."""
LATE = 30.0
"""Seconds to wait for other ranks after one has saved and ended."""
GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL."""
TAIL = 20
"""Lines of a dead rank's log to show."""


def spawn(
    num_workers: int,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    handed: bytes | None = None,
    patient: bool = False,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Run `python <argv>` as `num_workers` ranks on this machine, and return the exit code once all have ended.

    The program must enter its `main` through `reporting()` and `join` the world that it finds. VITPAR_DEBUG shows the
    traceback of a UserError or FaultError before its sentence.

    argv: arguments of the interpreter, for example `["-m", "package.module", "train"]`.
    env: environment variables to add to those of this process.
    handed: bytes for the ranks, which read them with `handed_over`.
    patient: whether the first SIGTERM, SIGUSR1 or Ctrl-C is only passed on to the ranks, which then end by themselves.
    A second one ends them. Ranks that the first one ends before they train are an end with SAVED, except after Ctrl-C.
    tell: receives the message of a world that failed or was stopped; None prints it.

    | exit code | meaning |
    |---|---|
    | 0 | success |
    | 1 | a FaultError, shown as one sentence, or a rank crashed or was killed |
    | 2 | a UserError, shown as one sentence |
    | 130, 143, 138 | stopped by Ctrl-C, SIGTERM or SIGUSR1 |
    | other | exit code of the rank that ended with it |

    Raises LaunchError if too few open files are allowed.
    """
    allow_open_files(num_workers)
    with (
        tempfile.TemporaryDirectory(prefix="vitpar-ranks-", ignore_cleanup_errors=True) as name,
        StopRequest(only_note=True) as stop,
    ):
        if handed is not None:
            with writing(path := Path(name, HANDED)):
                path.write_bytes(handed)
        # TCPStore would listen on all interfaces. This socket listens on loopback, and the store takes it over.
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        with _Workers(num_workers, argv, port, Path(name), env or {}) as workers:
            from torch.distributed import TCPStore  # the import takes seconds, in parallel with the workers

            store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(minutes=10),
                master_listen_fd=listener.detach(),
            )
            code, message = _supervise(workers, stop, patient)
        del store  # not earlier: its loss makes workers print errors
    if message:
        if is_terminal(sys.stdout):
            print("\x1b[?25h")  # rank 0 may have been stopped in the middle of a progress line, with the cursor hidden
        (tell or complain)(message)
    return code


def handed_over() -> bytes:
    """Return the bytes that the process that started this rank hands to its ranks."""
    return Path(os.environ[REPORTS], HANDED).read_bytes()


class _Failure(NamedTuple):
    """Failure of a worker."""

    rank: int
    time: float
    """Seconds since the epoch."""
    report: Report | None
    """Error that it reported; None if it ended without a report."""
    code: int
    """Exit code, or minus the number of the signal that killed it, as in subprocess; 0 while it still runs."""

    @property
    def order(self) -> tuple[int, float]:
        """Sort key that puts the root cause first.

        Causes come before aborts (NCCL's reaction to a lost peer), and aborts before lost peers; each by time.
        """
        symptom = 2 * self.report.peer_lost if self.report else self.code == -signal.SIGABRT
        return (int(symptom), self.time)

    @property
    def patience(self) -> float:
        """Seconds to wait for other failures, which may have led to this one."""
        if self.code == SAVED:
            return LATE
        certain = self.order[0] == 0 and (self.report is not None or self.code < 0)
        return CONFIRM if certain else SETTLE


class _Workers:
    """Worker processes: started on construction, ended with all their children when the block ends."""

    def __init__(self, num_workers: int, argv: Sequence[str], port: int, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._deaths: dict[int, float] = {}  # rank -> when it was first seen dead, in seconds since the epoch
        pipe, self._lifeline = os.pipe()
        threads = {"OMP_NUM_THREADS": str(cpu_share(num_workers))} if num_workers > 1 else {}  # alone: torch decides
        shared = {**threads, **os.environ, **env} | {
            "WORLD_SIZE": str(num_workers),
            "LOCAL_WORLD_SIZE": str(num_workers),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that rank 0 must not start a store: the parent has it
            REPORTS: str(folder),
        }
        try:
            for rank in range(num_workers):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), ERROR_FILE: str(folder / f"rank{rank}.json")}
                own |= {"PYTHONUNBUFFERED": "1"} if rank else {}  # no output is lost if a rank is killed
                # Rank 0 inherits our stdout and stderr.
                with self.log(rank).open("wb") if rank else contextlib.nullcontext() as output:
                    self.processes.append(
                        subprocess.Popen(
                            [sys.executable, *argv],
                            env=shared | own,
                            stdin=pipe,
                            stdout=output,
                            stderr=output,
                            start_new_session=True,  # not reached by the terminal's Ctrl-C, and one group to kill
                        )
                    )
        except BaseException:
            self.__exit__()
            raise
        finally:
            os.close(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End all workers and their children: by SIGTERM, and by SIGKILL after GRACE seconds."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while self.running() and time.monotonic() < deadline:
            time.sleep(POLL)
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        os.close(self._lifeline)

    def log(self, rank: int) -> Path:
        """Return the file with the output of `rank`, which is not 0."""
        return self.folder / f"rank{rank}.log"

    def running(self) -> bool:
        """Return whether any worker is alive."""
        return any(process.poll() is None for process in self.processes)

    def failures(self) -> list[_Failure]:
        """Return the workers that have reported an error or ended with a code other than 0 so far, the cause first."""
        failures = []
        for rank, process in enumerate(self.processes):
            code = process.poll() or 0
            if code:
                self._deaths.setdefault(rank, time.time() - POLL)
            # A report counts before the process ends: a worker may hang while it exits.
            report = Report.read(self.folder / f"rank{rank}.json")
            if report or code:
                failures.append(_Failure(rank, report.time if report else self._deaths[rank], report, code))
        return sorted(failures, key=lambda failure: failure.order)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to every worker's process group. Groups of dead workers get it too: their children may live."""
        for process in self.processes:
            # macOS: PermissionError for a group of zombies
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def _supervise(workers: _Workers, stop: StopRequest, patient: bool) -> tuple[int, str]:
    """Wait until all workers are done, one has failed or the user wants to stop; return exit code and message."""
    noticed: float | None = None
    passed_on = False
    while not (stop.again if patient else stop.asked):
        if stop.asked and not passed_on:
            for process in workers.processes:
                process.send_signal(stop.asked)
            passed_on = True
        running = workers.running()  # read before the failures: once no worker runs, every failure is known
        if failures := workers.failures():
            noticed = noticed or time.monotonic()
            if not running or time.monotonic() - noticed > failures[0].patience:
                if stop.asked and failures[0].code in (-stop.asked, 128 + stop.asked):  # it obeyed
                    break
                return _explain(failures, workers)
        elif not running:
            return 0, ""
        time.sleep(POLL)
    assert stop.asked is not None
    obeyed = patient and not stop.again and stop.asked != signal.SIGINT
    return SAVED if obeyed else 128 + stop.asked, f"stopped by {signal_words(stop.asked)}"


def _explain(failures: list[_Failure], workers: _Workers) -> tuple[int, str]:
    """Return exit code and message of the root cause, which is the first of `failures`."""
    rank, _, report, code = failures[0]
    if report and report.kind == "crash":
        return 1, f"rank {rank} failed: {report.headline}\n{report.traceback.rstrip()}"
    if report:
        trace = report.traceback if os.environ.get("VITPAR_DEBUG") else ""
        return 2 if report.kind == "user" else 1, f"{trace}error: {report.headline}"
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return 1, f"rank {rank} was killed by {signal.Signals(-code).name}{hint}{_tail(rank, workers)}"
    if [failure.code for failure in failures if not failure.report] == [code] * len(workers.processes):
        return code, ""  # all agree and none reported an error: the program chose this code
    return code, f"rank {rank} ended with exit code {code}{_tail(rank, workers)}"


def _tail(rank: int, workers: _Workers) -> str:
    """Return the end of the log of `rank`, to append to a sentence. Empty for rank 0, whose output the user saw."""
    lines = workers.log(rank).read_text(errors="replace").splitlines() if rank else []
    # After an abort, the words of the C library and the innermost calls stand around this line of `faulthandler`.
    fatal = (number for number, line in enumerate(lines) if line.startswith("Fatal Python error: "))
    end = next(fatal, len(lines)) + TAIL // 2
    shown = lines[max(0, min(end, len(lines)) - TAIL) : end]
    return "".join(["; its last output:", *(f"\n  {line}" for line in shown)]) if shown else ""
