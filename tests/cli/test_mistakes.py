"""Mistakes of every command and of a training's settings: refused in one sentence before any process starts."""

import shlex
import shutil
from pathlib import Path

import pytest

from helpers.command_line import Refused
from helpers.shared_runs import shared_run
from helpers.small_data import pack_small

MISTAKES = [
    (["train", "--mesh", "foo"], "unknown role 'foo'"),
    (["train", "--data", "gone"], "no data set at 'gone'"),
    (["train", "--mesh", "pp2xtp2xdp2"], ": make it with `vitpar data pack digits data_shards/digits`"),
    (["train", "--track", "mlflow"], "unknown tracker 'mlflow': use tensorboard, wandb or trackio"),
    (["check", "--mesh", "dp2xfoo"], "unknown role 'foo'"),
    (["bench", "--mesh", "foo"], "unknown role 'foo'"),
    (["plan", "foo"], "unknown role 'foo'"),
    (["plan", "dp2", "--hardware", "gone.json"], "cannot read the hardware profile gone.json"),
    (["search"], "cannot read the hardware profile hardware.json"),
    (["scaling"], "cannot read the hardware profile hardware.json"),
    (["models", "dino*v4"], "no published name has a part like 'dino*v4': `vitpar models` lists all"),
    (["models", "vit_bse_patch16_224"], "unknown model 'vit_bse_patch16_224' (did you mean 'vit_base_patch16_224'?)"),
    (["eval", "--checkpoint", "gone"], "'gone' holds no weights"),
    (["checkpoint", "list", "gone"], "there is no folder 'gone'"),
    (["checkpoint", "info", "gone"], "there is no folder 'gone'"),
    (["data", "info", "gone"], "no data set at 'gone'"),
    (["report", "gone"], "there is no run 'gone'"),
    (["runs", "gone"], "there is no folder 'gone'"),
    (["settings", "train.sed"], "unknown setting 'train.sed'"),
]


def test_mistakes_of_every_command_are_refused(tmp_path: Path, refused: Refused) -> None:
    refused(tmp_path, MISTAKES)


WRONG_RUNS = [
    ("--set data.crop_scale=[0.5,0.2]", "crop scale (0.5, 0.2) must be a range"),
    ("--set model.drop_path=0 --set train.drop_path_schedule=late(after=1)", "has no stochastic depth"),
    ("--mesh dp2+zero2 --schedule zbvzerobubble", "schedule zbvzerobubble needs pp"),
    ("--set train.attention=cudnn --device cpu", "train.attention 'cudnn' does not run on a cpu device"),
    ("--batch-size 16000000 --set model.image_size=2048", "use a smaller --batch-size"),
    ("--run-dir data", "the run folder 'data' exists and is not empty"),
    ("--data no_val --set checkpoint.keep_best=true", "'no_val' has no val split"),
    ("--weights gone", "--weights 'gone' does not exist"),
    ("--mesh auto --schedule gpipe --split even", "parallel.split is searched with --mesh auto"),
    ("--resume run --batch-size 16", "these settings changed: train.batch_size was 8 and is 16"),
]


def test_wrong_settings_of_a_training_are_refused(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, refused: Refused
) -> None:
    place = shutil.copytree(shared_run("small", tmp_path_factory), tmp_path / "place")
    pack_small(tmp_path / "other", val=False).rename(place / "no_val")
    rows = [(shlex.split(words), message) for words, message in WRONG_RUNS]
    refused(place, rows, "train", "--recipe", "recipe.toml")
