"""Output to terminals: lines broken between words, with paths and commands whole; no escape codes elsewhere."""

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from helpers.command_line import clean_environment
from vitpar.terminal import complain, wrap

LONG = "/home/someone/data/" + "deep/" * 20


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a short line", ["a short line"]),
        ("error: eleven more words are here", ["error: eleven more", "  words are here"]),
        (f"error: no data at '{LONG}'", ["error: no data at", f"  '{LONG}'"]),
        ("run `vitpar data pack digits x` first", ["run", "  `vitpar data pack digits x`", "  first"]),
        ("needs it: pip install -e '.[hub]'", ["needs it:", "  pip install -e '.[hub]'"]),
        ("torch's logits aren't these", ["torch's logits", "  aren't these"]),
        ("  note with  two spaces", ["  note with  two", "  spaces"]),
        ("Traceback\n  of several long lines of text", ["Traceback", "  of several long lines of text"]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str]) -> None:
    assert wrap(text, 20).split("\n") == lines


def test_only_a_terminal_gets_broken_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with open(theirs, "w") as terminal, (tmp_path / "log").open("w+") as file:
        for stream in (terminal, file):
            monkeypatch.setattr(sys, "stderr", stream)
            complain("error: eleven more words are here")
        file.seek(0)
        assert file.read() == "error: eleven more words are here\n"
        assert os.read(ours, 99).decode().splitlines() == ["error: eleven more", "  words are here"]
    os.close(ours)


OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PMIX_NAMESPACE": "job@1"}
OPENMPI |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize("launcher", [{}, OPENMPI], ids=["none", "mpirun"])
def test_ranks_of_mpirun_write_no_escape_codes_though_their_stdout_is_a_terminal(launcher: dict[str, str]) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-P", "-m", "vitpar_cli.main", "settings", "train.steps"]
    env = clean_environment() | {"TERM": "xterm"} | launcher
    subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=env, check=True, timeout=100)
    printed = os.read(ours, 9999)
    assert b"train.steps" in printed and (b"\x1b" in printed) == (not launcher)
    for end in (ours, theirs):
        os.close(end)
