"""A Swin Transformer on the command line: train, resume under another plan, evaluate, import weights, plan, bench."""

import json
import re
from pathlib import Path

import pytest
import torch

from helpers.command_line import Command, Refused, printed, refusal
from helpers.foreign_models import timm_swin
from helpers.run_folder import losses_of, rows_of
from helpers.small_data import CLASSES, VAL
from vitpar import model_config
from vitpar_cli.plan import plan

SIZES = {
    "patch_size": 1,
    "image_size": 8,
    "window_size": 2,
    "embed_dim": 8,
    "depths": [2, 2, 2],
    "num_heads": [2, 4, 4],
}
RECIPE = f"""
[model]
name = "swin_custom"
drop_path = 0.1
{chr(10).join(f"{name} = {value}" for name, value in SIZES.items())}

[data]
path = "data"
workers = 0

[train]
steps = 4
batch_size = 8
log_every = 1
eval_every = 4
ema_decay = 0.9

[checkpoint]
every = 2
keep = 0
"""


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    """Return a folder with packed data, a recipe, and weights of timm as a pickle of tensors."""
    config = model_config("swin_custom", num_classes=CLASSES, **SIZES)
    torch.save(timm_swin(config).state_dict(), place / "swin.pth")
    return place


@pytest.mark.slow
def test_run_resumes_under_another_plan_and_is_evaluated(place: Path, vitpar: Command) -> None:
    words = ("train", "--recipe", "recipe.toml", "--mesh")
    for mesh, run in (("dp1", "alone"), ("pp2xdp2", "meshed")):
        done = vitpar(*words, mesh, "--run-dir", run)
        assert done.returncode == 0, done.stderr
    assert losses_of(place / "meshed") == pytest.approx(losses_of(place / "alone"), rel=1e-4)
    done = vitpar("train", "--resume", "meshed/checkpoints/step_2", "--mesh", "fsdp2xtp2", "--run-dir", "resumed")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(place / "resumed", "train")] == [3, 4]
    assert losses_of(place / "resumed") == pytest.approx(losses_of(place / "alone")[2:], rel=1e-4)
    evaluated = vitpar("eval", "--checkpoint", "resumed/weights", "--data", "data", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)
    assert found["samples"] == VAL
    assert found["loss"] == pytest.approx(rows_of(place / "resumed", "eval")[-1]["loss"], rel=1e-4)


def test_timms_weights_are_imported_and_trained(place: Path, vitpar: Command) -> None:
    done = vitpar("checkpoint", "import", "swin.pth", "--out", "imported", "--image-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["format"] == "timm"
    words = ("--recipe", "recipe.toml", "--weights", "imported", "--set", "train.steps=1", "--run-dir", "begun")
    done = vitpar("train", *words)
    assert done.returncode == 0, done.stderr
    assert "parameters are loaded from" in (place / "begun" / "log.txt").read_text()


MISFITS = [
    (["--mesh", "tp4"], "tp4 does not divide the 2 heads of stage1 of swin_custom: give them another strategy, as "),
    (["--mesh", "pp1: stage4=dp2, *=tp2"], "swin_custom has no blocks called 'stage4'"),
    (["--set", "model.image_size=12"], "windows of 2x2 do not tile the 3x3 tokens of stage 3 of swin_custom"),
]


def test_plans_and_models_that_do_not_fit_are_refused_before_launch(place: Path, refused: Refused) -> None:
    refused(place, MISFITS, "train", "--recipe", "recipe.toml")


def test_suggested_plan_is_accepted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    found = re.search(r"as in '(.+)'", refusal(["plan", "tp4", "--recipe", "recipe.toml"], monkeypatch, capsys))
    assert found is not None
    assert "blocks 0-1: dp4" in printed(plan, found[1], "--recipe", "recipe.toml")
