"""Profile, search, validate and train with the real commands and real processes."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.command_line import run
from helpers.paths import EXPERIMENTS
from vitpar.errors import StrategyError
from vitpar.planner.measure.steps import run_in_subprocess


def test_run_in_subprocess_returns_values_and_raises_errors() -> None:
    mine = os.getpid()
    assert run_in_subprocess(os.getpid) != mine
    with pytest.raises(StrategyError, match="no such axis"):
        run_in_subprocess(lambda: (_ for _ in ()).throw(StrategyError("no such axis")))
    with pytest.raises(RuntimeError, match="exited with code 3"):
        run_in_subprocess(lambda: os._exit(3))


Command = Callable[..., str]


@pytest.fixture
def vitpar(tmp_path: Path) -> Command:
    """Return a function that runs `vitpar` in the test's folder and returns its output."""

    def printed(*words: str) -> str:
        done = run(tmp_path, words, timeout=900)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_predicted_memory_matches_the_measured_memory(tmp_path: Path, vitpar: Command) -> None:
    """Covers two plans on two ranks; `make bench-planner` measures more. docs/planning.md runs most of these commands.

    The short measuring time makes the timings useless, but not the memory.
    """
    recipe = ("--recipe", str(EXPERIMENTS / "planner.toml"))
    vitpar("profile", "hardware", "--ranks", "2", "--seconds", "0.001", "--device", "cpu")
    vitpar("profile", "model", *recipe, "--ranks", "2", "--seconds", "0.01", "--device", "cpu")
    validate = ("validate", *recipe, "--seconds", "0.01", "--device", "cpu")
    errors = []
    for plan in ("dp2+zero1", "pp1: 0-3=tp2+sp, *=fsdp2+ckpt"):  # together they would take turns to compare their times
        found = json.loads(vitpar(*validate, plan, "--json", "--out", f"{plan[:3]}.json"))
        (row,) = found["rows"]
        assert len(row["runs"]) >= 2 and all(len(run) >= 3 for run in row["runs"])
        assert row["measured_seconds"] > 0 and len(row["measured_memory_bytes"]) == 2
        errors.append(found["memory_error"])
    assert sum(error["mean"] for error in errors) / len(errors) < 0.03
    assert max(error["largest"] for error in errors) < 0.12
    assert found == json.loads((tmp_path / f"{plan[:3]}.json").read_text())
    vitpar(*validate, "dp2+zero1", "--correct", "better")
    files = ("--hardware", "better/hardware.json", "--model-profile", "better/model.json")
    assert "profiles were corrected: computation x" in vitpar("search", *recipe, *files, "--memory", "1GB")
