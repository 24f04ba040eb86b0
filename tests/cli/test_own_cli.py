"""A task and a model of the user's own through the command line: trained, resumed under another plan, evaluated."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.command_line import Command, Refused
from helpers.paths import ROOT
from helpers.small_data import CLASSES, pack_small, rename_classes

TASK = ("--task", "own_task.py:Value")
MODEL = ("--model", "vit_nano_patch4_16", "--set", "model.depth=2", "--batch-size", "16", "--set", "data.workers=0")
OWN = ("--model", "own_model.py:Mixer")
SMALL = ("--set", "model.options.depth=2", "--set", "model.options.width=16", "--set", "model.image_size=8")


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    for name in ("own_task.py", "own_model.py"):
        shutil.copy(ROOT / "examples" / name, place)
    rename_classes(pack_small(place / "values"), [str(2.5 * number) for number in range(CLASSES)])
    return place


def test_task_is_trained_resumed_evaluated_and_reported(place: Path, vitpar: Command) -> None:
    def said(*words: str, code: int = 0) -> str:
        done = vitpar(*words)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    data = ("--data", "values/packed")
    trained = said("train", *TASK, *MODEL, *data, "--mesh", "pp2xtp2", "--steps", "4", "--run-dir", "run")
    assert "1 output" in trained and "mean absolute error" in trained
    assert f"vitpar eval --checkpoint run/weights {' '.join(TASK)}" in trained
    more = ("--mesh", "fsdp2", "--steps", "6", "--allow-change", "train.steps")
    assert "give --task own_task.py:Value" in said("train", "--resume", "run", *more, code=2)
    assert "resuming from run/checkpoints/step_" in said("train", "--resume", "run", *TASK, *more)
    assert "give --task own_task.py:Value" in said("eval", "--checkpoint", "run", *data, code=2)
    figures = json.loads(said("eval", "--checkpoint", "run", *TASK, "--mesh", "tp2", "--json"))
    assert list(figures) == ["samples", "loss", "mae", "within"]
    image = next((place / "values" / "source").rglob("*.png"))
    (answer,) = json.loads(said("predict", str(image), "--checkpoint", "run", *TASK, "--json"))["images"]
    assert list(answer["predictions"][0]) == ["value"]
    said("report", "run", "--out", "page.html")
    page = (place / "page.html").read_text()
    assert "Mean absolute error" in page and "Top-" not in page  # the page has data in base64, without signs
    (run,) = json.loads(said("runs", "run", "--json"))["runs"]
    assert run["metric"]["name"] == "mae" and run["value"] == pytest.approx(figures["mae"], rel=1e-4)
    assert "mean absolute error" in " ".join(said("runs", "run").split())
    refused = said("report", "run", "--images", "3", *TASK, code=2)
    assert "--images shows classes, which task 'own_task.py:Value' does not predict" in refused


@pytest.mark.slow  # tests/test_examples.py trains the same model
def test_model_is_resumed_and_evaluated_under_another_plan_once_the_file_is_given(
    place: Path, vitpar: Command, refused: Refused
) -> None:
    plan = ("--mesh", "pp2xtp2", "--batch-size", "16", "--steps", "4", "--run-dir", "own")
    done = vitpar("train", *OWN, *SMALL, "--data", "data", *plan, "--set", "data.workers=0")
    assert done.returncode == 0, done.stderr
    more = ("train", "--resume", "own", "--mesh", "fsdp2", "--steps", "6", "--allow-change", "train.steps")
    evaluation = ("eval", "--checkpoint", "own", "--data", "data")
    rows = [
        (more, "own_model.py:Mixer' is a model of your own, which only the command line can name"),
        (evaluation, "give the file that defines it with --model FILE.py:NAME"),
    ]
    refused(place, rows)
    done = vitpar(*more, *OWN)
    assert done.returncode == 0, done.stderr
    done = vitpar(*evaluation, "--mesh", "tp2+sp", *OWN)
    assert done.returncode == 0 and "top-1" in done.stdout, done.stderr
