"""The task of examples/own_task.py through the command line, as docs/own-task.md says."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.paths import ROOT
from helpers.small_data import CLASSES, pack_small, rename_classes

TASK = ("--task", "own_task.py:Value")
MODEL = ("--model", "vit_nano_patch4_16", "--set", "model.depth=2", "--batch-size", "16", "--set", "data.workers=0")


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    shutil.copy(ROOT / "examples" / "own_task.py", place)
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
