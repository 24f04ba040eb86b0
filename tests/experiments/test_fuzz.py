"""The fuzzing harness: faulty readers that it must detect, and a few hostile cases for every reader."""

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import fuzz
from fuzzing.readers import READERS, Reader, each
from helpers.hostile_files import message_problem
from vitpar.errors import DataError

pytestmark = pytest.mark.tools


def attacked(reader: Reader, home: Path, cases: int) -> tuple[int, str]:
    """Return the exit code of the process that attacks a reader, and what it prints."""
    process = fuzz.start(reader, home, 0, cases)
    process.join()
    assert process.exitcode is not None
    return process.exitcode, Path(f"{home}.txt").read_text()


def refuse(words: str) -> None:
    raise DataError(words)


def another_error(place: Path) -> None:
    raise KeyError("label")


FAULTY: dict[str, tuple[Callable[[Path], object], str]] = {
    "raises another error": (another_error, "KeyError: 'label'"),
    "starts a program": (lambda place: subprocess.run(["true"], check=True), "forbidden: subprocess.Popen"),
    "writes elsewhere": (lambda place: (place.parents[1] / "elsewhere").write_text("x"), "forbidden: open"),
    "reads elsewhere": (lambda place: open("/etc/passwd").close(), "forbidden: open ('/etc/passwd'"),
    "connects": (lambda place: socket.socket().connect_ex(("127.0.0.1", 1)), "forbidden: socket.connect"),
    "prints an address": (lambda place: refuse("cannot read <object at 0x7f12ab34cd56>"), "at 0x7f12ab34cd56"),
    "crashes": (lambda place: os.abort(), "Fatal Python error: Aborted"),
    "hangs": (lambda place: time.sleep(60), "Timeout (0:00:00"),
}
"""Faults of readers of a file, and what is printed about them."""


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_reader_is_detected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.5 if name == "hangs" else 30)
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    fault, words = FAULTY[name]

    def read(place: Path) -> None:
        if (place / "file").read_bytes() != b"seed":
            fault(place)

    code, said = attacked(Reader(each("file", ["seed"]), read), tmp_path / "reader", 20)
    assert code and words in said, said


def test_damage_that_is_not_detected_is_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "ROOT", tmp_path)
    reader = Reader(each("file", ["seed", "other"]), lambda place: [(place / "file").read_bytes()], True)
    code, said = attacked(reader, tmp_path / "reader", 20)
    assert code and "Wrong: damage is not detected" in said, said
    assert re.search(r"case=file: b'.{0,12}'", said), said
    code, said = attacked(reader._replace(protected=False), tmp_path / "again", 20)
    assert (code, said) == (0, "20 cases accepted, 0 refused\n")


def test_reader_that_refuses_a_valid_input_is_detected(tmp_path: Path) -> None:
    code, said = attacked(Reader(each("file", ["seed"]), lambda place: refuse("no")), tmp_path / "reader", 1)
    assert code and "DataError: no" in said


@pytest.mark.parametrize("name", READERS)
def test_reader_survives_a_few_cases(name: str, tmp_path: Path) -> None:
    code, said = attacked(READERS[name], tmp_path / name, 8)
    assert code == 0, said


def test_message_problems_are_found() -> None:
    assert message_problem(DataError("line 1\nline 2 of '/x/0x7fff/y', dp0x2147483648, CRC 0x8953f384")) is None
    assert "address" in (message_problem(DataError("<a at 0x55d0c8a0b2c0>")) or "")
    assert "long" in (message_problem(DataError("x" * 3_001)) or "")
