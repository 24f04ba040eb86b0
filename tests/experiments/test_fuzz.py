"""The fuzzing harness: a few hostile cases for every reader, and planted faulty readers that it must detect."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuzzing import report
from fuzzing.attacks import binary, images, jsons, tars, tomls, zips
from fuzzing.hunt import Slot, Tally, hunt
from fuzzing.oracle import Finding, message_problem
from fuzzing.seeds import samples, tar
from fuzzing.target import FileTarget, found, names
from helpers.paths import ROOT
from helpers.planted_readers import CASES
from vitpar.errors import DataError

EACH = 15
PATIENT_S = 40.0
"""Time limit of a case, in seconds; generous, because other tests run in parallel."""
TOLERANT = ("run",)
"""Targets that may accept all of their first cases: their readers leave out the parts that they cannot read."""


def planted(kind: str, limit: float = 20.0, last: int = CASES - 1) -> Tally:
    """Return the tally of a planted reader's cases."""
    tally = Tally(f"helpers.planted_readers:{kind}")
    with Slot(limit=limit) as slot:
        slot.attack(tally, 0, last, 60.0)
    return tally


def kinds(tally: Tally) -> set[tuple[str, int]]:
    """Return each kind of finding with the number of its case."""
    return {(one.finding.kind, one.case) for one in tally.found.values()}


@pytest.mark.slow
def test_every_reader_survives_its_first_cases() -> None:
    tallies = {name: Tally(name) for name in names()}
    hunt(tallies, cases=EACH, limit=PATIENT_S)
    assert not (wrong := report.findings(tallies)), "\n\n".join(wrong)
    assert {tally.cases for tally in tallies.values()} == {EACH}
    for name, tally in tallies.items():
        assert 0 < tally.accepted < EACH + (name in TOLERANT), tally


def test_good_reader_has_no_findings() -> None:
    tally = planted("Good")
    assert (tally.cases, tally.accepted, tally.found) == (CASES, CASES - 1, {})


@pytest.mark.parametrize(
    ("kind", "expected", "words"),
    [
        ("Crashes", "crash", "SIGSEGV"),
        ("Exits", "crash", "exit code 3"),
        ("RaisesAnother", "error", "KeyError: 'label'"),
        ("EatsMemory", "memory", "MiB above"),
        ("AsksForMemory", "memory", "not so much memory"),
        ("StartsAProgram", "program", "subprocess.Popen"),
        ("StartsAStub", "program", "gs --version"),
        ("WritesElsewhere", "place", "outside the folder"),
        ("TellsAnAddress", "message", "0x7f12ab34cd56"),
        ("TellsTooMuch", "message", "2,000 characters"),
    ],
)
def test_faulty_reader_is_detected_and_other_cases_still_run(kind: str, expected: str, words: str) -> None:
    tally = planted(kind)
    assert kinds(tally) == {(expected, 1)}
    assert any(words in one.finding.words for one in tally.found.values()), tally.found
    assert tally.cases == CASES and tally.accepted >= CASES - 1


def test_hanging_reader_is_killed_with_its_stack() -> None:
    tally = planted("Hangs", limit=0.5)
    assert kinds(tally) == {("hang", 1)}
    assert "planted_readers.py" in next(iter(tally.found.values())).finding.words
    assert (tally.cases, tally.accepted) == (CASES, CASES - 1)


def test_fault_of_the_harness_is_reported_and_other_cases_still_run() -> None:
    tally = planted("CannotBeMade")
    assert kinds(tally) == {("harness", 1)}
    assert "the attack itself is wrong" in next(iter(tally.found.values())).finding.words
    assert (tally.cases, tally.accepted) == (CASES - 1, CASES - 1)


def test_silent_damage_and_refused_seeds_are_found() -> None:
    assert {kind for kind, _ in kinds(planted("ChangesSilently", last=60))} == {"damage"}
    tally = planted("RefusesItsSeed")
    assert kinds(tally) == {("damage", 0)}
    assert tally.accepted == 0


def fuzz(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run the fuzzing program with the planted readers on its path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])}
    command = [sys.executable, "experiments/fuzz.py", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_single_case_can_be_repeated_and_kept(tmp_path: Path) -> None:
    done = fuzz("--target", "strategy", "--case", "0", "--keep", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted" in done.stdout
    done = fuzz("--target", "helpers.planted_readers:RaisesAnother", "--case", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert 'raise KeyError("label")' in done.stdout


def test_exit_code_says_whether_there_are_findings() -> None:
    done = fuzz("--target", "helpers.planted_readers:RaisesAnother", "--cases", str(CASES))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "--target helpers.planted_readers:RaisesAnother --case 1" in done.stdout


@pytest.mark.parametrize("name", ["plan", "strategy", "zip", "tar", "checkpoint", "pickle"])
def test_case_has_the_same_bytes_every_time(name: str, tmp_path: Path) -> None:
    targets: list[Any] = [found(name)(tmp_path / side) for side in ("one", "other")]
    for number in range(18):
        one, other = (target.case(name, number, tmp_path / "case") for target in targets)
        assert (one.files, one.told, one.how) == (other.files, other.told, other.how)


def test_attacks_produce_many_variants() -> None:
    draw, members = random.Random(0), samples(4)
    whole, page = tar(members), b'{"a": [1, 2.5, "x"], "b": {"c": null}}'
    attacks = {
        "small": lambda: binary.small(draw, whole, [whole], [b"token"]),
        "rough": lambda: binary.rough(draw, whole, [whole], [b"token"]),
        "json": lambda: jsons.json_attack(draw, page),
        "toml": lambda: tomls.toml_attack(draw, b"a = 1\n[b]\nc = 'x'\n"),
        "tar": lambda: tars.attack(draw, members, "cls"),
        "zip": lambda: zips.attack(draw, zips.packed(members)),
        "image": lambda: images.attack(draw, members[1][1]),
    }
    for name, attack in attacks.items():
        made = {attack()[0] for _ in range(25)}
        assert len(made) > 8, f"{name} makes only {len(made)} kinds"


def test_about_half_of_the_cases_are_format_blind(tmp_path: Path) -> None:
    target = found("tfrecord")(tmp_path)
    assert isinstance(target, FileTarget)
    said = [target.case("tfrecord", number, tmp_path / "case").how for number in range(30, 330)]
    assert 0.35 < sum("sealed" not in how for how in said) / len(said) < 0.65


def test_message_problems_are_found() -> None:
    assert message_problem(DataError("line 1\nline 2 of '/x/0x7fff/y', dp0x2147483648, CRC 0x8953f384")) is None
    assert "address" in (message_problem(DataError("<a at 0x55d0c8a0b2c0>")) or "")
    assert "long" in (message_problem(DataError("x" * 1_201)) or "")


def test_similar_findings_are_merged_into_the_shortest_case() -> None:
    tally = Tally("x")
    for case, size in ((5, 300), (9, 20), (11, 40)):
        tally.keep(Finding("error", "KeyError", "a.py:1", f"case {case}"), case, "an edit", size)
    tally.keep(Finding("crash", "SIGSEGV", "?", "dead"), 1, "an edit", 1)
    first, second = report.findings({"x": tally})
    assert first.startswith("CRASH") and "--target x --case 1" in first
    assert second.startswith("ERROR") and "3 cases alike" in second and "--case 9" in second and "case 9" in second
