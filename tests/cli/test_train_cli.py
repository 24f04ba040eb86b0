"""`vitpar train`, `eval` and `check` as a user runs them: output files and refusals."""

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from helpers.command_line import Command, Refused, refusal
from helpers.run_folder import losses_of, rows_of
from helpers.shared_runs import shared_run
from helpers.small_data import CLASSES, TRAIN, VAL, damage
from vitpar.recipe import read_recipe
from vitpar.strategy.plan_json import read_plan

STEPS = 4
TRAIN_KEYS = [
    *("kind", "step", "epoch", "samples", "samples_crc32", "loss", "lr", "grad_norm"),
    *("step_ms", "data_ms", "images_per_second", "mfu", "memory_bytes", "top1", "time"),
]
DETAILS = ("grad_norms", "update_ratios", "memory_by_rank")
"""Keys that only some rows have: numbers of groups of layers, and of all ranks."""
EVAL_KEYS = ["kind", "step", "samples", "loss", "top1", "top5", "ece", "time"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed data, a recipe, and a run of one process."""
    return shutil.copytree(shared_run("small", tmp_path_factory), tmp_path_factory.mktemp("train") / "place")


@pytest.fixture(scope="module")
def alone_run(place: Path) -> Path:
    """Return the folder of the run of one process."""
    return place / "run"


def test_run_folder_has_complete_files(alone_run: Path) -> None:
    assert {path.name for path in alone_run.iterdir()} == {
        *("recipe.toml", "plan.json", "env.json", "log.txt", "metrics.jsonl", "checkpoints", "weights")
    }
    assert [path.name for path in (alone_run / "checkpoints").iterdir()] == [f"step_{STEPS}"]
    usual = (alone_run / "log.txt").stat().st_mode
    assert {path.stat().st_mode for path in alone_run.rglob("*") if path.is_file()} == {usual}
    asked = read_recipe(alone_run.parent / "recipe.toml")
    assert read_recipe(alone_run / "recipe.toml") == asked.with_precision("fp32")
    assert str(read_plan(alone_run / "plan.json")) == "dp1"
    env = json.loads((alone_run / "env.json").read_text())
    assert {"command", "git_commit", "python", "torch"} <= env.keys()
    assert env["command"][1:] == ["train", "--recipe", "recipe.toml", "--run-dir", "run"]

    rows, evaluations = rows_of(alone_run, "train"), rows_of(alone_run, "eval")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and [row["step"] for row in evaluations] == [3, 4]
    for row in rows:
        assert [key for key in row if key not in DETAILS] == TRAIN_KEYS
        assert row["samples"] == 8 * row["step"]
        assert row["epoch"] == pytest.approx(row["samples"] / (TRAIN * CLASSES), abs=1e-5)
        assert row["images_per_second"] == pytest.approx(8 / row["step_ms"] * 1e3, rel=0.01)
        assert row["mfu"] is None and row["memory_bytes"] > 1e6 and row["grad_norm"] > 0 and row["data_ms"] >= 0
    for row in evaluations:
        assert list(row) == EVAL_KEYS
        assert row["samples"] == VAL and 0 <= row["top1"] <= row["top5"] <= 1

    lines = (alone_run / "log.txt").read_text().splitlines()
    events = [line.split()[2] for line in lines]
    assert all(datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S") for line in lines)
    assert events == ["start", "step", "step", "step", "eval", "step", "eval", "saving", "step_4", "done"]
    assert "vit_custom" in lines[0] and "dp1" in lines[0] and f"loss {losses_of(alone_run)[0]:.4f}" in lines[1]


def test_a_dry_run_shows_recipe_plan_and_memory_and_starts_nothing(place: Path, vitpar: Command) -> None:
    words = ("train", "--recipe", "recipe.toml", "--mesh", "fsdp2xtp2", "--run-dir", "dry", "--dry-run")
    decaying = (*words, "--set", "optimizer.weight_decay_end=0.4")
    done = vitpar(*decaying)
    assert done.returncode == 0, done.stderr
    assert 'mesh = "fsdp2xtp2"' in done.stdout and "batch_size = 8" in done.stdout
    model, mesh, rate, drawn, decay, memory, duration, last = done.stdout.splitlines()[-8:]
    assert re.match(r"time       about .*: the model takes [\d,]+ images/s, the CPUs prepare [\d,]+;", duration)
    assert model.startswith("model      vit_custom, 0.0") and mesh == "mesh       fsdp2xtp2 on 4 ranks of cpu, fp32"
    assert memory.startswith("memory     a step is predicted to need ") and last == "dry run: no training was started"
    assert rate == "lr         0.01 from the first step, cosine to 0" and drawn.lstrip().startswith("█")
    assert decay.startswith("decay      ▁") and " 0.05 to 0." in decay
    found = json.loads(vitpar(*decaying, "--json").stdout)
    assert found["learning_rate"][0] == [1, 0.01] and found["weight_decay"][0] == pytest.approx([1, 0.05])
    assert found["predicted_memory_bytes"] > 1e5 and found["plan"]["strategy"]
    assert not (place / "dry").exists()


def test_mesh_gives_the_losses_of_one_process(place: Path, alone_run: Path, vitpar: Command) -> None:
    done = vitpar("train", "--recipe", "recipe.toml", "--mesh", "pp2xtp2", "--run-dir", "mesh", "--json")
    assert done.returncode == 0, done.stderr
    assert losses_of(place / "mesh") == pytest.approx(losses_of(alone_run), rel=1e-5)
    norms = [[row["grad_norm"] for row in rows_of(folder, "train")] for folder in (place / "mesh", alone_run)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert summary["weights"] == "mesh/weights" and summary["steps"] == STEPS
    assert {key: summary[key] for key in EVAL_KEYS[2:-1]} == {
        key: rows_of(place / "mesh", "eval")[-1][key] for key in EVAL_KEYS[2:-1]
    }
    parts = {path.name for path in (place / "mesh" / "weights").glob("*.safetensors")}
    assert len(parts) == 2


def test_eval_repeats_the_last_evaluation(place: Path, alone_run: Path, vitpar: Command) -> None:
    """Settings of the training plan, here prefetch, do not matter."""
    copy = shutil.copytree(alone_run / "weights", place / "sharded")
    text = (copy / "recipe.toml").read_text().replace('mesh = "dp1"', 'mesh = "fsdp2"')
    (copy / "recipe.toml").write_text(f"{text}\n[communication]\nprefetch = 2\n")
    expected = rows_of(alone_run, "eval")[-1]
    for checkpoint in ("run", "sharded"):
        done = vitpar("eval", "--checkpoint", checkpoint, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == pytest.approx({key: expected[key] for key in EVAL_KEYS[2:-1]})
    assert "prefetch = 2" in (copy / "recipe.toml").read_text()


@pytest.mark.slow
def test_check_fails_beyond_its_tolerance(vitpar: Command) -> None:
    """The commands of docs/checking.md pass."""
    strict = vitpar("check", "--recipe", "recipe.toml", "--mesh", "dp2", "--tolerance", "1e-12")
    assert strict.returncode == 1
    assert "FAILED" in strict.stdout and "Traceback" not in strict.stderr


@pytest.fixture(scope="module")
def spoilt(place: Path) -> list[str]:
    """Copy the data to `place`/spoilt and damage two training images and one validation image. Return their names."""
    shutil.copytree(place / "data", place / "spoilt")
    return [damage(place / "spoilt", split, sample) for split, sample in (("train", 4), ("train", 11), ("val", 2))]


def test_bad_image_ends_the_run_with_its_name(spoilt: list[str], vitpar: Command) -> None:
    done = vitpar("train", "--recipe", "recipe.toml", "--data", "spoilt", "--steps", "5")
    assert done.returncode == 2
    assert done.stderr.startswith("error: sample '") and done.stderr.count("\n") == 1
    assert any(name in done.stderr for name in spoilt)


BAD_INPUT = [
    (["--mesh", ""], "empty"),
    (["--mesh", "dp3"], "a batch of 8 samples does not divide into the 3 data-parallel parts"),
    (["--mesh", "pp2", "--split", "uneven"], "unknown split 'uneven'"),
    (["--data", "empty"], "no data set at 'empty'"),
    (["--recipe", "gone.toml"], "no recipe 'gone.toml'"),
    (["--model", "vit_smal_patch4_8"], "unknown model 'vit_smal_patch4_8' (did you mean 'vit_small_patch"),
    (["--run-dir", "recipe.toml"], "the run folder 'recipe.toml' exists"),
    (["--run-dir", "recipe.toml/run"], "the run folder 'recipe.toml/run' cannot be created"),
    (["--epochs", "2", "--steps", "5"], "both train.epochs and train.steps are given: keep one"),
    (["--set", "data.std=[0.0, 1.0, 1.0]"], "must be positive in every channel"),
    (["--device", "cuda"], "this machine has no CUDA GPU: use --device cpu"),
    (["--device", "tpu"], "unknown device 'tpu': use cpu or cuda"),
]


def test_invalid_input_is_refused_before_launch(place: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (place / "empty").mkdir(exist_ok=True)
    before = sorted(place.iterdir())
    rows = [([] if "--recipe" in words else ["--recipe", "recipe.toml"]) + words for words, _ in BAD_INPUT]
    for words, (_, message) in zip(rows, BAD_INPUT, strict=True):
        refused(place, [(words, message)], "train")
        assert sorted(place.iterdir()) == before, f"{words} left something behind"


def test_plan_must_match_the_world_size(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    words = ["train", "--recipe", "recipe.toml", "--mesh"]
    assert "'pp2' needs 2 ranks but the world has 4" in refusal([*words, "pp2"], monkeypatch, capsys)
    assert "which does not divide 4 ranks" in refusal([*words, "pp3xdp"], monkeypatch, capsys)


OTHER_COMMANDS = [
    (["eval", "--checkpoint", "run", "--mesh", "dp2", "--set", "data.std=[0, 1, 1]"], "must be positive in every"),
    (["eval", "--checkpoint", "run", "--set", "optimizer.lr=1"], "optimizer.lr changes nothing in an evaluation"),
    (["check", "--mesh", "tp5"], "tp5"),
    (["check", "--mesh", "dp2", "--set", "optimizer.weight_decay_end=0.1"], "weight_decay_end changes nothing in a"),
    (["check", "--mesh", "dp2", "--set", "data.flip=0.1"], "--set data.flip changes nothing in a check"),
    (["plan", "tp2", "--set", "data.flip=0.1"], "--set data.flip changes nothing in a plan, which uses task.…"),
]


def test_other_commands_refuse_invalid_input(place: Path, refused: Refused, alone_run: Path) -> None:
    refused(place, OTHER_COMMANDS)
