"""A model of the user's own through the command line: trained, resumed under another plan, evaluated, checked."""

import shutil
from pathlib import Path

import pytest

from helpers.command_line import Command, Refused
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


def test_run_is_resumed_and_evaluated_under_another_plan_once_the_file_is_given(
    place: Path, trained: Path, vitpar: Command, refused: Refused
) -> None:
    more = ("train", "--resume", "run", "--mesh", "fsdp2", "--steps", "6", "--allow-change", "train.steps")
    evaluation = ("eval", "--checkpoint", "run", "--data", "data")
    rows = [
        (more, "own_model.py:Mixer' is a model of your own, which only the command line can name"),
        (evaluation, "give the file that defines it with --model FILE.py:NAME"),
    ]
    refused(place, rows)
    done = vitpar(*more, *MODEL)
    assert done.returncode == 0, done.stderr
    done = vitpar(*evaluation, "--mesh", "tp2+sp", *MODEL)
    assert done.returncode == 0 and "top-1" in done.stdout, done.stderr
