"""Server with torch and vitpar loaded: commands and their ranks run in forks of it, without seconds of imports.

    test, or launcher of ranks ── request ──> server ── fork ──> waiter ── fork ──> command, in a new session
                               <── process id, then wait status ───┘

A command has the arguments, folder, environment and files of a new process. The server has run no command and has one
thread, so commands share no state. Unlike in a new interpreter, imports are done and all forks hash strings alike.
"""

import atexit
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any, ClassVar

MODULES = ("vitpar_cli.main", "vitpar_cli.worker")
"""Programs that run in forks: commands, and the ranks that they start."""
LOADED = f"""
{" ".join(MODULES)} vitpar.check vitpar.bench vitpar.training.trainer vitpar.training.recorded vitpar.planner.report
vitpar.runs vitpar.planner.out_of_memory vitpar.weights.importing vitpar_cli.progress vitpar_cli.plan_view
torch.profiler torch.distributed.checkpoint torch.distributed.elastic.agent.server einops._torch_specific
safetensors.torch numpy.ma PIL.JpegImagePlugin PIL.PngImagePlugin
""".split()
"""Modules that commands import, in part when they run."""
READ_LATE = re.compile("VITPAR_|MASTER_|RANK|WORLD|LOCAL_|TORCH(ELAST|INDUCT)|PYTORCH_NVML|PYTHONUNBUF|HF_|NO_PROXY")
"""Variables that are read after LOADED is imported. Other libraries may read others at import."""
HIGH = 500  # first descriptor above those that processes pass on


def early(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that a command and its server have in common."""
    return {name: value for name, value in environment.items() if not READ_LATE.match(name)}


class Process(subprocess.Popen[Any]):
    """subprocess.Popen, which forks `vitpar` in a new session from the server if that has the right environment."""

    requests: ClassVar[socket.socket | None] = None  # to the server; None starts all processes as usual
    environment: ClassVar[dict[str, str]] = {}  # of the server
    _replies: socket.socket | None = None

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*values).arguments
        args, env = list(given["args"]), given["env"] or dict(os.environ)
        safe = args[1:2] == ["-P"]
        module = given["start_new_session"] and args[0] == sys.executable and args[1 + safe : 3 + safe]
        if not self.requests or module not in (["-m", name] for name in MODULES) or early(env) != self.environment:
            return super()._execute_child(*values)
        ends = (given[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        files = [number if end == -1 else end for number, end in enumerate(ends)] + [*given["pass_fds"]]
        request = {
            "module": args[2 + safe],
            "words": args[3 + safe :],
            "safe": safe,
            "cwd": given["cwd"] or os.getcwd(),
            "env": env,
        }
        request["files"] = [0, 1, 2, *given["pass_fds"]]
        self._replies, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            data = json.dumps(request, default=os.fspath).encode()
            socket.send_fds(self.requests, [data], [its.fileno(), self.requests.fileno(), *files])
        self.pid, self._child_created = int(self._replies.recv(99)), True
        self._close_pipe_fds(*(given[name + end] for name in ("p2c", "c2p", "err") for end in ("read", "write")))

    def _try_wait(self, flags: int) -> tuple[int, int]:
        if self._replies is None:
            return super()._try_wait(flags)
        try:
            return self.pid, int(self._replies.recv(99, socket.MSG_DONTWAIT if flags else 0))
        except BlockingIOError:
            return 0, 0

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self._replies is None:
            return super().poll()
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


def serve(requests: socket.socket) -> None:
    """Fork a process for each request. Returns in that process alone."""
    children = 0
    while True:
        data, files, _, _ = socket.recv_fds(requests, 2**20, 64)  # nothing once the tests have ended
        while children and os.waitpid(-1, os.WNOHANG if data else 0)[0]:
            children -= 1
        if not data:
            os._exit(0)
        assert len(os.listdir("/proc/self/task")) == 1, "the server must have one thread when it forks"
        if os.fork() == 0:
            break
        children += 1
        for file in files:
            os.close(file)
    if pid := os.fork():
        os.dup2(files[0], HIGH)
        os.closerange(0, HIGH)
        os.write(HIGH, str(os.waitpid(pid, 0)[1]).encode())
        os._exit(0)
    request = json.loads(data)
    begin(request, files)
    return request["module"]


def begin(request: dict[str, Any], files: list[int]) -> None:
    """Give this process the session, files, folder, environment and arguments of `request`."""
    os.setsid()
    os.write(files[0], str(os.getpid()).encode())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore it
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, HIGH) for file in files]
    os.closerange(3, HIGH)
    for file, target in zip(high[2:], request["files"], strict=True):
        os.dup2(file, target)
        os.close(file)
    os.close(high[0])
    Process.requests = socket.socket(fileno=high[1])
    subprocess.Popen = Process  # type: ignore[misc]
    os.chdir(request["cwd"])
    set_by_imports = {name: value for name, value in os.environ.items() if name not in Process.environment}
    os.environ.clear()
    os.environ.update(set_by_imports | request["env"])
    raw = "PYTHONUNBUFFERED" in os.environ
    for name, file in (("stdout", 1), ("stderr", 2)):
        binary, former = os.fdopen(file, "wb", 0 if raw else -1, closefd=False), getattr(sys, name)
        setattr(sys, name, io.TextIOWrapper(binary, former.encoding, former.errors, None, file == 2, raw))
    sys.path[:0] = [] if request["safe"] else [os.getcwd()]
    sys.argv = ["-m", *request["words"]]


if __name__ == "__main__":
    # Freeing every module would take a second. The first exit handler is the last to run.
    atexit.register(lambda: (sys.stdout.flush(), sys.stderr.flush(), os._exit(code)))
    Process.environment = early(dict(os.environ))
    for name in LOADED:
        importlib.import_module(name)
    for name in MODULES:
        del sys.modules[name]  # each command runs it again
    gc.freeze()  # a collection then does not copy the pages of all modules
    listener, code = socket.socket(fileno=int(sys.argv[1])), 1
    try:
        runpy.run_module(serve(listener), run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
