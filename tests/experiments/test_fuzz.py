"""The fuzzing harness: planted faulty readers that it must detect, and a few hostile cases for every reader."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import composite

from fuzzing.campaign import Campaign, Tally
from fuzzing.edits import edited
from fuzzing.oracle import message_problem
from fuzzing.readers import TARGETS
from helpers.paths import ROOT
from vitpar.errors import DataError

EACH = 15
TOLERANT = ("run",)
"""Targets that may accept all cases: their readers leave out the parts that they cannot read."""
Planted = Callable[..., Tally]


@pytest.fixture
def planted(tmp_path: Path, environment: None) -> Planted:
    """Return a function that runs the campaign of a planted reader and returns its tally."""

    def run(kind: str, cases: int = 12, limit: float = 20.0, shrink: float = 0.0) -> Tally:
        home = tmp_path / "home"
        home.mkdir()
        campaign = Campaign(f"helpers.planted_readers:{kind}", home, tmp_path / "keep", limit, shrink)
        campaign.run(60.0, cases=cases)
        return campaign.tally

    return run


@pytest.mark.tools
def test_good_reader_has_no_findings(planted: Planted) -> None:
    tally = planted("Planted")
    assert not tally.found and tally.cases > 5 and 0 < tally.accepted < tally.cases


@pytest.mark.tools
@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        ("Crashes", "crash", "SIGSEGV"),
        ("Exits", "crash", "exit code 3"),
        ("RaisesAnother", "error", "KeyError: 'label'"),
        ("StartsAProgram", "program", "subprocess.Popen"),
        ("StartsAStub", "program", "gs --version"),
        ("WritesElsewhere", "place", "outside the folder"),
        ("Connects", "place", "socket.connect"),
        ("TellsAnAddress", "message", "0x7f12ab34cd56"),
        ("TellsTooMuch", "message", "2,000 characters"),
        ("AcceptsDamage", "damage", "nothing is said"),
        ("RefusesItsSeed", "damage", "a seed is refused"),
        ("CannotBeMade", "harness", "the strategy itself is wrong"),
    ],
)
def test_faulty_reader_is_detected(kind: str, expected: str, words: str, planted: Planted, tmp_path: Path) -> None:
    tally = planted(kind)
    assert {finding for finding, _, _ in tally.found} == {expected}
    assert any(words in finding.words for finding in tally.found.values())
    assert any(words in path.read_text() for path in tmp_path.glob("keep/*/*/finding.txt"))


@pytest.mark.tools
def test_hanging_reader_is_killed_with_its_stack(planted: Planted) -> None:
    tally = planted("Hangs", cases=1, limit=0.3)
    (found,) = tally.found.values()
    assert found.kind == "hang" and "planted_readers.py" in found.words


@pytest.mark.tools
def test_finding_is_shrunk_and_repeated_from_the_database(planted: Planted, tmp_path: Path) -> None:
    (found,) = planted("NeedsTheRightNumber", cases=2_000, shrink=60.0).found.values()
    simplest = next(tmp_path.glob("keep/*/*/file")).read_bytes()
    assert len(simplest) < 30 and simplest[1] > 200
    (tmp_path / "home").rename(tmp_path / "before")
    (again,) = planted("NeedsTheRightNumber", cases=0).found.values()
    assert again == found


@pytest.mark.tools
def test_program_prints_how_to_repeat_a_finding(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    options = ["--only", "helpers.planted_readers:RaisesAnother", "--cases", "5", "--limit", "40"]
    command = [sys.executable, "experiments/fuzz.py", *options, "--keep", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fuzz.py --only helpers.planted_readers:RaisesAnother --again" in done.stdout
    assert 'raise KeyError("label")' in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_reader_survives_its_first_cases(name: str, tmp_path: Path, environment: None) -> None:
    (tmp_path / "home").mkdir()
    campaign = Campaign(name, tmp_path / "home", tmp_path / "keep", 40.0)
    campaign.run(1e6, cases=EACH)
    tally = campaign.tally
    assert not tally.found, "\n\n".join(finding.words for finding in tally.found.values())
    assert 0 < tally.accepted < tally.cases + (name in TOLERANT), tally


@settings(derandomize=True, deadline=None, database=None)
@given(composite(edited)(b"9" * 400))
def test_number_that_no_float_can_hold_is_edited(new: tuple[bytes, bool]) -> None:
    assert isinstance(new[0], bytes)


def test_message_problems_are_found() -> None:
    assert message_problem(DataError("line 1\nline 2 of '/x/0x7fff/y', dp0x2147483648, CRC 0x8953f384")) is None
    assert "address" in (message_problem(DataError("<a at 0x55d0c8a0b2c0>")) or "")
    assert "long" in (message_problem(DataError("x" * 1_201)) or "")
