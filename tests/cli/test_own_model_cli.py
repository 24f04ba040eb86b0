"""A model of the user's own through the command line: trained, resumed under another plan, evaluated, checked."""

import shutil
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.paths import ROOT

MODEL = ("--model", "own_model.py:Mixer")
SMALL = ("--set", "model.options.depth=2", "--set", "model.options.width=16", "--set", "model.image_size=8")


pytestmark = pytest.mark.slow  # tests/test_examples.py trains the same model


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    shutil.copy(ROOT / "examples" / "own_model.py", place)
    return place


@pytest.fixture(scope="module")
def trained(place: Path, vitpar: Command) -> Path:
    """Train four steps under tp and pp; return the run's folder."""
    plan = ("--mesh", "pp2xtp2", "--batch-size", "16", "--steps", "4", "--run-dir", "run")
    done = vitpar("train", *MODEL, *SMALL, "--data", "data", *plan, "--set", "data.workers=0")
    assert done.returncode == 0, done.stderr
    return place / "run"


def test_run_goes_on_under_another_plan_once_the_file_is_given(trained: Path, vitpar: Command) -> None:
    more = ("--mesh", "fsdp2", "--steps", "6", "--allow-change", "train.steps")
    refused = vitpar("train", "--resume", "run", *more)
    assert refused.returncode == 2
    assert "own_model.py:Mixer' is a model of your own, which only the command line can name" in refused.stderr
    done = vitpar("train", "--resume", "run", *MODEL, *more)
    assert done.returncode == 0, done.stderr


def test_evaluation_needs_the_file(trained: Path, vitpar: Command) -> None:
    refused = vitpar("eval", "--checkpoint", "run", "--data", "data")
    assert refused.returncode == 2 and "give the file that defines it with --model FILE.py:NAME" in refused.stderr
    done = vitpar("eval", "--checkpoint", "run", "--data", "data", "--mesh", "tp2+sp", *MODEL)
    assert done.returncode == 0 and "top-1" in done.stdout, done.stderr


def test_check_passes_under_a_layerwise_plan(vitpar: Command, place: Path) -> None:
    done = vitpar("check", *MODEL, *SMALL, "--mesh", "pp2: 0=tp2+sp, *=fsdp2+ckpt", "--batch-size", "16")
    assert done.returncode == 0, done.stdout + done.stderr


def test_search_plans_for_it(vitpar: Command, place: Path) -> None:
    done = vitpar("search", *MODEL, "--cluster", "2xH100", "--batch-size", "64")
    assert done.returncode == 0 and "--model own_model.py:Mixer" in done.stdout, done.stderr
