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

RECIPE = """
[model]
name = "vit_custom"
image_size = 8
patch_size = 2
embed_dim = 32
depth = 2
num_heads = 4
[data]
path = "unused"
[train]
steps = 1
batch_size = 8
"""


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
def test_profile_validate_and_search_work_in_sequence(tmp_path: Path, vitpar: Command) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = ("--recipe", "recipe.toml")
    vitpar("profile", "hardware", "--ranks", "2", "--seconds", "0.01", "--device", "cpu")
    vitpar("profile", "model", *recipe, "--ranks", "2", "--seconds", "0.01", "--device", "cpu")
    validation = ("validate", "dp2", "pp2", *recipe, "--seconds", "0.1", "--device", "cpu", "--json")
    found = json.loads(vitpar(*validation, "--out", "rows.json"))
    assert len(found["rows"]) == 2 and found["repeat"]["mean"] >= 0
    assert found == json.loads((tmp_path / "rows.json").read_text())
    for row in found["rows"]:
        assert len(row["runs"]) >= 2 and all(len(run) >= 3 for run in row["runs"])
        assert row["measured_seconds"] > 0 and len(row["measured_memory_bytes"]) == 2
    vitpar("validate", "dp2", *recipe, "--seconds", "0.1", "--device", "cpu", "--correct", "better")
    files = ("--hardware", "better/hardware.json", "--model-profile", "better/model.json")
    assert "profiles were corrected: computation x" in vitpar("search", *recipe, *files, "--memory", "1GB")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_predicted_memory_matches_the_measured_memory(vitpar: Command) -> None:
    """Covers plans of every kind on two ranks; `make bench-planner` measures more of them.

    The short measuring time makes the timings useless, but not the memory.
    """
    plans = ("dp2+zero1", "pp1: 0-3=tp2+sp, *=fsdp2+ckpt")
    recipe = ("--recipe", str(EXPERIMENTS / "planner.toml"))
    vitpar("profile", "hardware", "--ranks", "2", "--seconds", "0.001", "--device", "cpu")
    vitpar("profile", "model", *recipe, "--ranks", "2", "--seconds", "0.01", "--device", "cpu")
    errors = []
    for plan in plans:  # together they would take turns to compare their times
        found = json.loads(vitpar("validate", plan, *recipe, "--seconds", "0.01", "--device", "cpu", "--json"))
        assert len(found["rows"]) == 1
        errors.append(found["memory_error"])
    assert sum(error["mean"] for error in errors) / len(plans) < 0.03
    assert max(error["largest"] for error in errors) < 0.12
