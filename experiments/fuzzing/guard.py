"""Run cases in a forked process with limits, and detect what a reader may not do.

Memory is the kernel's peak of resident memory during a case, minus the resident memory before it. Far above the limit,
allocations fail, which protects the machine. Started programs are detected in two ways: by Python's audit events, and
by stubs in the first folder of PATH. These have the names of shells and of programs that image libraries start, and
write a file when they run.
"""

import ctypes
import faulthandler
import gc
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from fuzzing import oracle
from fuzzing.case import Case, Target
from fuzzing.oracle import Finding
from vitpar.errors import UserError

SECONDS, GRACE_S = 5.0, 2.0
"""Time limit of a case, and time that a process has beyond it to print its stacks."""
PATIENCE = 4.0
"""Factor of the time limit when a case is repeated."""
MIB, MOST_MIB = 1 << 20, 1 << 10
"""Bytes of a MiB, and memory limit of a case in MiB."""
ADDRESS_BYTES = 7 * MOST_MIB * MIB // 2
"""Address space that a process may use beyond that of its parent."""
RETIRES_BYTES, RETIRES_FILES = 1 << 29, 200
"""Growth of memory, and number of open files, at which the process is replaced."""
STUBS = ["gs", "gswin64c", "sh", "bash", "aws", "gsutil", "convert", "magick", "ffmpeg", "python", "python3"]
CANARY = "canary-that-no-reader-may-open"
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
"""Names of audit events."""
_LIBC = ctypes.CDLL(None)


@dataclass
class Outcome:
    """Result of a case."""

    refusal: str | None = None
    """Traceback of the error, None if the case was accepted."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    mib: float = 0.0
    """Growth of resident memory, in MiB."""
    findings: list[Finding] = field(default_factory=list)
    is_last: bool = False
    """Whether the process must be replaced, so that the next case is not blamed for this one."""


class Watch:
    """Audit hook that records started programs, access to files outside the case, and connections.

    folders: where files may be written. programs: programs that may be started; if there are any, connections to this
    machine are allowed too.
    """

    def __init__(self, folders: tuple[Path, ...], programs: tuple[str, ...]) -> None:
        self.on, self.findings = False, set[Finding]()
        self._programs = programs
        self._allowed = (*(f"{folder.resolve()}" for folder in folders), "/dev/", "/proc/")
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        problem = self.on and self._problem(event, *arguments)
        if problem:
            frame: FrameType | None = sys._getframe()
            while frame is not None and not oracle.ours(frame.f_code.co_filename):
                frame = frame.f_back
            where = oracle.short(frame.f_code.co_filename, frame.f_lineno) if frame else "?"
            self.findings.add(Finding(problem[0], event, where, f"{event} of {problem[1]!r:.300}"))

    def _problem(self, event: str, *arguments: Any) -> tuple[str, Any] | None:
        """Return kind and object of a forbidden action."""
        if event in STARTS:
            allowed = event == "subprocess.Popen" and os.path.basename(str(arguments[0])) in self._programs
            return None if allowed else ("program", arguments[:2])
        if event in CONNECTS:
            host = arguments[1] if event == "socket.connect" else arguments[0]
            host = host[0] if isinstance(host, tuple) and host else host
            return None if self._programs and host in ("127.0.0.1", "localhost") else ("place", host)
        path = arguments[0] if event == "open" or event in CHANGES else None
        if path is None or isinstance(path, int):
            return None
        whole, flags = os.path.abspath(os.fsdecode(path)), arguments[2] if event == "open" else os.O_WRONLY
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        inside = whole.startswith(self._allowed) or "__pycache__" in whole
        return ("place", f"{whole}, outside the case") if whole.endswith(CANARY) or (writes and not inside) else None


class Guard:
    """Runner of cases, in a forked process that is replaced when it has ended.

    home: empty folder. limit: seconds that a case may take.
    """

    def __init__(self, target: Target, home: Path, limit: float = SECONDS) -> None:
        self._target, self._home, self._limit = target, home, limit
        self._place, self._temporary, self._errors = home / "case", home / "temporary", home / "errors"
        self._ran = home / "stubs-that-ran"
        self._worker: tuple[int, Connection] | None = None
        (home / "stubs").mkdir()
        for name in STUBS:
            stub = home / "stubs" / name
            stub.write_text(f'#!/bin/sh\necho "{name} $*" >> "{self._ran}"\n')
            stub.chmod(0o755)
        (home / CANARY).write_text("secret")

    def run(self, case: Case) -> Outcome:
        """Write the files of a case and read it.

        A case that takes too long is repeated with more time, because other processes may slow it down. It is a finding
        if it takes too long again, or too much time of the CPU.
        """
        outcome = self._once(case, self._limit)
        if any(one.kind == "hang" for one in outcome.findings):
            again = self._once(case, PATIENCE * self._limit)
            return outcome if again.cpu_seconds > self._limit else again
        return outcome

    def _once(self, case: Case, limit: float) -> Outcome:
        for folder in (self._place, self._temporary):
            if not folder.is_dir() or any(os.scandir(folder)):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
        self._errors.write_bytes(b"")
        self._ran.unlink(missing_ok=True)
        before = {*os.listdir(self._home), self._ran.name}
        case.write(self._place)
        self._target.prepare(case)
        _, connection = self._worker = self._worker or self._start()
        in_time = True
        try:
            connection.send((case, limit))
            in_time = connection.poll(limit + GRACE_S)
            if not in_time:
                raise EOFError
            outcome: Outcome = connection.recv()
            if outcome.is_last:
                self.end()
        except (EOFError, OSError):
            status, said = self.end(), self._errors.read_text(errors="replace")[:6000]
            if not in_time or said.startswith("Timeout ("):
                words, kind = f"takes more than {limit:g} s", ("hang", "")
            else:
                kind = "crash", signal.Signals(-status).name if status < 0 else f"exit code {status}"
                words = f"the process ended: {kind[1]}"
            finding = Finding(*kind, oracle.place(said, 0), f"{words}\n{said}")
            outcome = Outcome(words, limit * (kind[0] == "hang"), findings=[finding])
        if self._ran.exists():
            words = self._ran.read_text(errors="replace").strip()
            outcome.findings.append(Finding("program", f"stub {words.split(' ')[0]}", "?", f"ran: {words:.500}"))
        for name in {*os.listdir(self._home)} - before:
            outcome.findings.append(Finding("place", "left", "?", f"wrote '{name}' outside the folder of the case"))
            path = self._home / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return outcome

    def _start(self) -> tuple[int, Connection]:
        ours, theirs = Pipe()
        gc.freeze()  # a collection in the forked process would copy all memory
        child = os.fork()
        if child == 0:
            try:
                ours.close()
                self._work(theirs)
            finally:
                os._exit(70)
        theirs.close()
        return child, ours

    def end(self) -> int:
        """Kill the process and all that it started; return its exit status."""
        if self._worker is None:
            return 0
        (child, connection), self._worker = self._worker, None
        connection.close()
        ended = os.pidfd_open(child)
        select.select([ended], [], [], 0.2)  # its status says more if it ends by itself
        os.close(ended)
        for kill in (os.killpg, os.kill):  # it may not have its own group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _work(self, connection: Connection) -> None:
        """Read cases in the forked process."""
        os.setpgid(0, 0)
        die_with_parent()
        errors = os.open(self._errors, os.O_WRONLY | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(errors, stream)
        os.chdir(self._home)
        os.environ["PATH"] = f"{self._home / 'stubs'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        tempfile.tempdir = str(self._temporary)
        address = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (address + ADDRESS_BYTES, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(errors)
        watch, begin = Watch((self._place, self._temporary), self._target.programs), memory("VmRSS")
        while True:
            case, limit = connection.recv()
            faulthandler.dump_traceback_later(limit, exit=True, file=errors)
            outcome = self._outcome(case, watch)
            faulthandler.cancel_dump_traceback_later()
            grown = memory("VmRSS") > begin + RETIRES_BYTES or len(os.listdir("/proc/self/fd")) > RETIRES_FILES
            outcome.is_last = grown or bool(outcome.findings)
            connection.send(outcome)

    def _outcome(self, case: Case, watch: Watch) -> Outcome:
        outcome = Outcome()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before, begin, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
        watch.findings.clear()
        watch.on = True
        try:
            self._target.read(case, self._place)
        except BaseException as error:
            outcome.refusal = oracle.trace(error)
            outcome.findings += oracle.of_error(error)
            if isinstance(error, UserError) and case.is_seed:
                outcome.findings.append(
                    Finding("damage", "seed", oracle.place(outcome.refusal), f"a seed is refused: {error}")
                )
        watch.on = False
        outcome.findings += sorted(watch.findings)
        outcome.cpu_seconds = time.process_time() - cpu
        outcome.seconds, outcome.mib = time.perf_counter() - begin, (memory("VmHWM") - before) / MIB
        if outcome.mib > MOST_MIB:
            words = f"{outcome.mib:,.0f} MiB above the memory before the case\n{outcome.refusal or 'accepted'}"
            outcome.findings.append(Finding("memory", "taken", oracle.place(words), words))
        return outcome


def memory(key: str) -> int:
    """Return an entry of /proc/self/status in bytes, for example VmHWM, the peak of resident memory."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    _LIBC.prctl(1, signal.SIGKILL)
