"""Run `vitpar` on the CPU, as a user would: in a fork of a server that has torch loaded, or in a new process.

`run` forks. A test starts a new process, by `started` or a launcher, if it is about what a fork cannot show: signals,
kills and hangs; torchrun and other programs that start vitpar; what happens before or while torch is imported; standard
streams other than pipes; ranks that hash strings differently. `run` does so by itself if an environment variable is not
that of the server, since libraries read some at import.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import command_server
from helpers.command_server import Process, early
from helpers.paths import ROOT

Command = Callable[..., "subprocess.CompletedProcess[str]"]
"""A function that runs `vitpar <words>`, behind `launcher` if given."""
Refused = Callable[..., None]
"""The fixture `refused`: a function of a folder, rows (words, sentence), and words that all commands start with."""
_servers: "list[subprocess.Popen[bytes]]" = []


before_session = before_file = dict(os.environ)
"""Variables at the start of the session and of the current test file. Imports and other tests set some in between."""


def clean_environment() -> dict[str, str]:
    """Return the session's environment as this test file changed it, without launchers, to run vitpar on the CPU."""
    launchers = ("VITPAR_", "MASTER_", "RANK", "WORLD", "LOCAL_", "PYTEST_")
    env, gone = before_session | dict(os.environ.items() - before_file.items()), before_file.keys() - os.environ.keys()
    env = {name: value for name, value in env.items() if name not in gone and not name.startswith(launchers)}
    paths = (str(ROOT / "src"), str(ROOT / "cli"), os.environ.get("PYTHONPATH", ""))
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


ENVIRONMENT = early(clean_environment())
"""Environment of the server, before any test changes variables."""


def started(
    place: Path, words: Iterable[str], launcher: Iterable[str] = (), process: Callable[..., Any] = subprocess.Popen
) -> "subprocess.Popen[str]":
    """Start ``vitpar <words>`` in the folder `place`, behind `launcher`, in a new process and session.

    process: Process forks the server instead
    """
    command = [sys.executable, *launcher, "-m", "vitpar_cli.main", *words]
    pipe = subprocess.PIPE
    return process(
        command,
        cwd=place,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def forked(place: Path, words: Iterable[str]) -> "subprocess.Popen[str]":
    """Start ``vitpar <words>`` in the folder `place` in a fork of the server."""
    if not _servers and sys.platform == "linux":
        _servers.append(server())
    return started(place, words, process=Process)


def run(
    place: Path, words: Iterable[str], launcher: Iterable[str] = (), timeout: float = 200
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end and return its output; kill it and its children after `timeout` seconds."""
    process = started(place, words, launcher) if launcher else forked(place, words)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


WITHOUT_TORCH = """
import json, os, sys
sys.modules["torch"] = None
import vitpar_cli.main
ended = []
for words in json.load(sys.stdin):
    files = [os.memfd_create(name) for name in ("out", "err")]
    if os.fork() == 0:
        os.dup2(files[0], 1), os.dup2(files[1], 2)
        sys.argv = ["vitpar", *words]
        vitpar_cli.main.main()
    code = os.waitstatus_to_exitcode(os.wait()[1])
    ended.append((code, *(os.pread(file, 2**30, 0).decode() for file in files)))
print(json.dumps(ended))
"""


def run_without_torch(place: Path, commands: list[list[str]]) -> "list[subprocess.CompletedProcess[str]]":
    """Run commands, for a terminal of 80 columns, in forks of a new process that cannot import torch."""
    program, env = [sys.executable, "-c", WITHOUT_TORCH], clean_environment() | {"COLUMNS": "80"}
    words = json.dumps(commands)
    done = subprocess.run(program, cwd=place, env=env, input=words, capture_output=True, text=True, timeout=100)
    return [subprocess.CompletedProcess("vitpar", *ended) for ended in json.loads(done.stdout)]


def server() -> "subprocess.Popen[bytes]":
    """Start the server of `Process`."""
    Process.requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    Process.environment, null = ENVIRONMENT, subprocess.DEVNULL
    with its:
        command = [sys.executable, "-P", command_server.__file__, str(its.fileno())]
        return subprocess.Popen(command, env=Process.environment, stdin=null, stdout=null, pass_fds=[its.fileno()])


def stop_servers() -> None:
    """Stop the server, if one was started."""
    while _servers:
        assert Process.requests is not None
        Process.requests.close()
        _servers.pop().communicate()


def printed(command: Callable[..., Any], *words: str) -> str:
    """Return what the function of a command prints in this process; raise its error."""
    import typer
    from typer.testing import CliRunner

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    done = CliRunner().invoke(app, words)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def refusal(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one error line of `vitpar <words>`, which must exit with 2 before it starts any process."""
    from vitpar_cli.main import main

    def spawned(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", spawned)
    monkeypatch.setattr(sys, "argv", ["vitpar", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.strip()
