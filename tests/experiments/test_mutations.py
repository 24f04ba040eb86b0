"""The mutation table matches the source, and the tool distinguishes caught, missed, crashed and hanging mutations."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from mutating.command import judge_check, judge_error
from mutating.mutation import Mutation, mutated, problem
from mutating.table import MUTATIONS
from mutations import run

SOURCE = "import sys\n\nlimit = 5\nspare = 7\n"
TESTS = """
from thing import limit

def test_limit():
    assert limit == 5

def test_division():
    assert 10 / limit < 3
"""


def of(name: str, new: str, *, test: str = "test_limit") -> Mutation:
    """Return a mutation of the repository `small`."""
    command = f"pytest test_thing.py::{test}"
    old = "spare = 7" if "spare" in new else "limit = 5"
    return Mutation(name, "It is wrong.", "thing.py", old, new, command)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository of one module, with an ignored file and no commit; copies go into tmp_path/copies."""
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    root = tmp_path / "small"
    root.mkdir()
    files = {"thing.py": SOURCE, "test_thing.py": TESTS, ".gitignore": "large\n", "large": "", "pytest.ini": "[pytest]"}
    files["conftest.py"] = "from hypothesis import settings\n\nsettings.register_profile('first')\n"
    for name, text in files.items():
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


def test_every_mutation_matches_the_source() -> None:
    assert len(MUTATIONS) > 40
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[a-z0-9.-]+", name) for name in names)
    assert not (wrong := [words for mutation in MUTATIONS if (words := problem(ROOT, mutation))]), "\n".join(wrong)
    assert all(re.fullmatch(r"[A-Z2-3].*\.", mutation.breaks) and mutation.caught_by for mutation in MUTATIONS)


def test_mutated_sources_have_no_undefined_names(tmp_path: Path) -> None:
    """An undefined name would crash every command, which is not the same as catching the mutation."""
    for mutation in MUTATIONS:
        if mutation.file.endswith(".py"):
            (tmp_path / f"{mutation.name}.py").write_text(mutation.applied((ROOT / mutation.file).read_text()))
    lint = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--target-version", "py311"]
    done = subprocess.run([*lint, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_commands_name_existing_tests() -> None:
    for command in {mutation.caught_by for mutation in MUTATIONS}:
        program, *words = shlex.split(command)
        assert (program, words[:2]) in (("vitpar", ["check", "--mesh"]), ("pytest", words[:2])), command
        for node in words if program == "pytest" else ():
            path, _, name = node.partition("::")
            text = (ROOT / path).read_text()
            assert path.startswith("tests/") and f"def {name.partition('[')[0]}" in text, node


def test_mutation_that_does_not_match_is_refused(small: Path) -> None:
    assert problem(small, of("fits", "limit = 6")) is None
    refused = {
        "occurs 0 times in thing.py": Mutation("gone", "", "thing.py", "limit = 4", "", ""),
        "occurs 2 times in thing.py": Mutation("twice", "", "thing.py", " = ", "", ""),
        "which does not exist": Mutation("nowhere", "", "other.py", "x", "", ""),
        "is not Python": of("syntax", "limit ="),
        "changes nothing": of("same", "limit = 5"),
    }
    for message, mutation in refused.items():
        assert message in (problem(small, mutation) or "")
    with mutated(small, of("fits", "limit = 6")):
        assert "limit = 6" in (small / "thing.py").read_text()
    assert (small / "thing.py").read_text() == SOURCE


@pytest.mark.tools
def test_only_a_failed_assertion_counts(small: Path) -> None:
    mutations = (
        of("caught", "limit = 6"),
        of("missed", "spare = 8"),
        of("crashes", "limit = 0", test="test_division"),
        of("cannot be imported", "import nothing_that_exists"),
        of("ends the process", "sys.exit(1)"),
        of("no such test", "limit = 6", test="test_nothing"),
    )
    found = run(small, mutations, parallel=2, limit=60.0)
    starts = ("CRASH cannot be imported", "CRASH crashes", "CRASH ends the process", "CRASH on the clean source")
    assert tuple(sorted(words.partition(":")[0] for words in found)) == (
        *starts,
        "MISSED missed",
        "NOT RUN no such test",
    )
    assert "MISSED missed: It is wrong.\n  pytest test_thing.py::test_limit" in "\n".join(found)
    assert "ZeroDivisionError" in "\n".join(found)
    assert (small / "thing.py").read_text() == SOURCE and not list((small.parent / "copies").iterdir())


def test_verdicts_distinguish_failures_from_crashes() -> None:
    assert judge_check(0, "table\npassed: worst is loss\n") == ("passed", "passed: worst is loss")
    assert judge_check(1, "FAILED: worst is head.fc.bias\n")[0] == "failed"
    for code, said in ((1, "rank 1 failed: KeyError\n"), (1, ""), (2, "FAILED: x"), (0, ""), (1, "passed: x")):
        assert judge_check(code, said)[0] == "crash"
    trace = "helpers.ranks.RankError: rank 1 of 2:\nTraceback (most recent call last):\n  File a\n    x\n{}\n"
    failed = trace.format("AssertionError: 3 > 2\nassert False")
    assert judge_error(failed) == ("failed", "AssertionError: 3 > 2")
    crash = trace.format("vitpar.errors.DataError: no")
    assert judge_error(crash) == ("crash", "vitpar.errors.DataError: no")
    for words, kind in (("assert 1 == 2", "failed"), ("Failed: DID NOT RAISE", "failed"), ("KeyError: 'x'", "crash")):
        assert judge_error(words) == (kind, words)
