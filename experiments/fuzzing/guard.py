"""Run cases in a forked process with limits, and detect what a reader may not do.

Memory is the kernel's peak of resident memory during a case, minus the resident memory before it. Above `ADDRESS_BYTES`
allocations fail, which protects the machine and counts as a refusal. Started programs are detected in two ways: by
Python's audit events, and by stubs in the first folder of PATH. These have the names of shells and of programs that
image libraries start, and write a file when they run.
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzzing import oracle
from fuzzing.case import Case, Target
from fuzzing.oracle import Finding

SECONDS, GRACE_S = 5.0, 2.0
"""Time limit of a case, and time that a process has beyond it to print its stacks."""
PATIENCE = 4.0
"""Factor of the time limit when a case is repeated."""
MIB = 1 << 20
ADDRESS_BYTES = 3584 * MIB
"""Address space that a process may use beyond that of its parent."""
RETIRES_BYTES, RETIRES_CASES = 1 << 29, 500
"""Growth of memory, and number of cases, at which the process is replaced."""
STUBS = ["gs", "gswin64c", "sh", "bash", "aws", "gsutil", "convert", "magick", "ffmpeg", "python", "python3"]
CANARY = "canary-that-no-reader-may-open"
STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
CONNECTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname")
"""Names of audit events."""
FORK = multiprocessing.get_context("fork")


@dataclass
class Outcome:
    """Result of a case."""

    refused: bool = False
    """Whether the reader raised an error, or its process ended."""
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
            where = oracle.place("".join(traceback.format_stack()))
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
        self._worker: tuple[multiprocessing.context.ForkProcess, Connection] | None = None
        (home / "stubs").mkdir()
        for name in STUBS:
            stub = home / "stubs" / name
            stub.write_text(f'#!/bin/sh\necho "{name} $*" > "{home}/ran {name}"\n')
            stub.chmod(0o755)
        (home / CANARY).write_text("secret")
        self._own = {self._place, self._temporary, self._errors, *home.iterdir()}

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
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        self._errors.write_bytes(b"")
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
            outcome = Outcome(True, limit * (kind[0] == "hang"), findings=[finding])
        for path in {*self._home.iterdir()} - self._own:
            words = f"{path.name}: {path.read_text(errors='replace')!r:.500}" if path.is_file() else path.name
            kind = "program" if path.name.startswith("ran ") else "place"
            outcome.findings.append(
                Finding(kind, "stub or file", "?", f"outside the folder of the case it left {words}")
            )
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return outcome

    def _start(self) -> tuple[multiprocessing.context.ForkProcess, Connection]:
        ours, theirs = FORK.Pipe()
        gc.freeze()  # a collection in the forked process would copy all memory
        process = FORK.Process(target=self._work, args=(theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def end(self) -> int:
        """Kill the process and all that it started; return its exit status."""
        if self._worker is None:
            return 0
        (process, connection), self._worker = self._worker, None
        connection.close()
        process.join(0.2)  # its status says more if it ends by itself
        assert process.pid is not None
        with suppress(ProcessLookupError, PermissionError):  # it may not have its own group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        return process.exitcode or 0

    def _work(self, connection: Connection, parents: Connection) -> None:
        """Read cases in the forked process."""
        parents.close()
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
        for number in range(RETIRES_CASES):
            try:
                case, limit = connection.recv()
            except EOFError:
                return
            faulthandler.dump_traceback_later(limit, exit=True, file=errors)
            outcome = self._outcome(case, watch)
            faulthandler.cancel_dump_traceback_later()
            grown = memory("VmRSS") > begin + RETIRES_BYTES or number == RETIRES_CASES - 1
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
            outcome.refused = True
            outcome.findings += oracle.of_error(error, case.is_seed)
        watch.on = False
        outcome.findings += sorted(watch.findings)
        outcome.cpu_seconds = time.process_time() - cpu
        outcome.seconds, outcome.mib = time.perf_counter() - begin, (memory("VmHWM") - before) / MIB
        return outcome


def memory(key: str) -> int:
    """Return an entry of /proc/self/status in bytes, for example VmHWM, the peak of resident memory."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
