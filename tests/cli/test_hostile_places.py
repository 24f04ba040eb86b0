"""Output on terminals, on full devices, to readers that are gone and in ASCII; run folders that vanish."""

import fcntl
import io
import os
import resource
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from helpers.command_line import clean_environment, forked, run
from helpers.command_server import Process
from helpers.small_data import pack_small
from vitpar.terminal import complain, wrap
from vitpar_cli.main import main


def test_a_full_device_behind_the_output_is_one_sentence() -> None:
    command = [sys.executable, "-m", "vitpar_cli.main", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=clean_environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: cannot write: No space left on device: free some space\n")


def test_output_without_a_reader_is_no_error() -> None:
    command = [sys.executable, "-m", "vitpar_cli.main", "models"]
    read, write = os.pipe()
    os.close(read)
    gone = subprocess.run(command, env=clean_environment(), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    shell = ["bash", "-c", f"{shlex.join(command)} >&-"]
    closed = subprocess.run(shell, env=clean_environment(), stderr=subprocess.PIPE, text=True)
    assert (gone.returncode, gone.stderr) == (141, "") and (closed.returncode, closed.stderr) == (0, "")


def training(place: Path, steps: int, *words: str) -> tuple[str, ...]:
    """Return the words of a command that trains a tiny model."""
    sizes = ("--set", "model.image_size=8", "--set", "model.patch_size=4", "--set", "data.workers=0")
    data = ("--data", str(pack_small(place)), "--steps", str(steps), "--batch-size", "4")
    return ("train", "--recipe", "digits", *data, *sizes, "--set", "train.log_every=1", "--run-dir", "run", *words)


def test_training_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    process = forked(tmp_path, training(tmp_path, 3))
    assert process.stdout and process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait(100)) == ("", 0)
    assert "done  val loss" in (tmp_path / "run" / "log.txt").read_text()


def test_a_full_device_behind_two_ranks_is_one_sentence(tmp_path: Path) -> None:
    words = training(tmp_path, 1, "--mesh", "dp2")
    with open("/dev/full", "w") as full:
        process = Process(
            [sys.executable, "-m", "vitpar_cli.main", *words],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _, errors = process.communicate(timeout=100)
    assert (process.returncode, errors) == (2, "error: cannot write: No space left on device: free some space\n")


def test_a_limit_of_file_size_is_one_sentence_with_the_path(tmp_path: Path) -> None:
    process = forked(tmp_path, training(tmp_path, 100, "--set", "checkpoint.every=0"))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8192, 8192))
    _, errors = process.communicate(timeout=100)
    words = "error: cannot write 'run/metrics.jsonl': File too large: raise the limit of a file's size (ulimit -f)\n"
    assert (process.returncode, errors) == (2, words)


@pytest.mark.slow
def test_a_removed_run_folder_is_written_again(tmp_path: Path) -> None:
    process = forked(tmp_path, training(tmp_path, 200, "--set", "train.eval_every=200"))
    assert process.stdout
    for line in process.stdout:
        if line.startswith("step "):
            break
    shutil.rmtree(tmp_path / "run")
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0 and errors == ""
    assert "warning: the run folder 'run' or its metrics.jsonl was removed" in out
    rows = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"step": 200' in rows and (tmp_path / "run" / "recipe.toml").is_file()
    assert "warning: the run folder" in (tmp_path / "run" / "log.txt").read_text()


def test_a_terminal_that_knows_ascii_alone_gets_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, "ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["vitpar", "plan", "pp2xtp2"])
    with pytest.raises(SystemExit):
        main()
    assert b"stage 1 ?  2     3   ?" in file.getvalue()


def test_a_run_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    words = ("train", "--recipe", "digits", "--data", str(pack_small(tmp_path)), "--set", "model.image_size=8")
    for folder in ("/proc/run", "/dev/null/run"):
        done = run(tmp_path, (*words, "--set", "model.patch_size=4", "--steps", "1", "--run-dir", folder))
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"error: the run folder '{folder}' cannot be" in done.stderr and "--run-dir" in done.stderr


LONG = "/home/someone/data/" + "deep/" * 20


WRAPPED = [
    ("error: eleven more words are here", ["error: eleven more", "  words are here"]),
    (f"error: no data at '{LONG}'", ["error: no data at", f"  '{LONG}'"]),
    ("run `vitpar data pack digits x` first", ["run", "  `vitpar data pack digits x`", "  first"]),
    ("needs it: pip install -e '.[hub]'", ["needs it:", "  pip install -e '.[hub]'"]),
    ("torch's logits aren't these", ["torch's logits", "  aren't these"]),
    ("Traceback\n  of several long lines of text", ["Traceback", "  of several long lines of text"]),
]


def test_lines_break_between_words() -> None:
    for text, lines in WRAPPED:
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


def test_ranks_of_mpirun_write_no_escape_codes_though_their_stdout_is_a_terminal() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-P", "-m", "vitpar_cli.main", "settings", "train.steps"]
    env = clean_environment() | {"TERM": "xterm"} | OPENMPI
    subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, env=env, check=True, timeout=100)
    printed = os.read(ours, 9999)
    assert b"train.steps" in printed and b"\x1b" not in printed
    for end in (ours, theirs):
        os.close(end)
