"""Run `vitpar` in a separate process on the CPU, as a user would."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from helpers.paths import ROOT

Command = Callable[..., "subprocess.CompletedProcess[str]"]
"""A function that runs `vitpar <words>`, behind `launcher` if given."""


def clean_environment() -> dict[str, str]:
    """Return this process's environment without launcher variables, set to run this checkout's vitpar on the CPU."""
    launchers = ("VITPAR_", "MASTER_", "RANK", "WORLD", "LOCAL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    paths = (str(ROOT / "src"), str(ROOT / "cli"), os.environ.get("PYTHONPATH", ""))
    return env | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def started(place: Path, words: Iterable[str], launcher: Iterable[str] = ()) -> "subprocess.Popen[str]":
    """Start ``vitpar <words>`` in the folder `place`, behind `launcher`, in a new session."""
    command = [sys.executable, *launcher, "-m", "vitpar_cli.main", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=place,
        env=clean_environment(),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        # A shell that runs the tests in the background has Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def run(
    place: Path, words: Iterable[str], launcher: Iterable[str] = (), timeout: float = 200
) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end and return its output; kill it after `timeout` seconds."""
    process = started(place, words, launcher)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


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
