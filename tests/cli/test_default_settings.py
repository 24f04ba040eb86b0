"""Commands without a recipe: default settings, automatic precision, and batches that exceed memory."""

import json
import os
import shutil
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.command_line import Command, Refused, printed
from helpers.small_data import CLASSES, TRAIN
from vitpar.errors import DataError
from vitpar.recipe import DEFAULT_RECIPE, Recipe, read_recipe
from vitpar.recipe.defaults import recipe_for
from vitpar.recipe.request import RecipeRequest
from vitpar_cli.data_pack import RECORD, packed

IMAGES = TRAIN * CLASSES
MODEL = "vit_nano_patch4_8"
STREAM = ("stream.train=a.tar", "stream.val=b.tar", "stream.samples=77", "stream.val_samples=9", "stream.classes=4")


@pytest.fixture(scope="module")
def place(place: Path) -> Path:
    (place / "recipe.toml").write_text('[train]\nepochs = 3\n[data]\npath = "data"\n')
    return place


@pytest.fixture(scope="module")
def default_run(place: Path, vitpar: Command) -> tuple[Path, str]:
    """Train without a recipe; return the run's folder and the output."""
    words = ("--model", MODEL, "--steps", "4", "--batch-size", "40", "--run-dir", "run", "--set", "data.workers=0")
    done = vitpar("train", "--data", "data", *words, "--set", "train.log_every=1")
    assert done.returncode == 0, done.stderr
    return place / "run", done.stdout


def test_data_without_a_recipe_trains_with_the_defaults(default_run: tuple[Path, str]) -> None:
    folder, words = default_run
    options = {"data.path": "data", "model.name": MODEL, "train.steps": 4, "train.batch_size": 40}
    expected = recipe_for(IMAGES, options, ["data.workers=0", "train.log_every=1"])
    assert read_recipe(folder / "recipe.toml") == expected.with_precision("fp32")
    assert words.count(f"defaults for {IMAGES} images") == 1
    assert "mixup 0.8 or CutMix 1" in words and "precision  fp32 (auto)" in words
    assert f"warning: the batch of 40 samples is larger than the training set of {IMAGES}" in words


def test_defaults_apply_only_without_a_recipe(place: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.chdir(place)
    named = {"data.path": "data"}

    def training_recipe(*request: Any) -> tuple[Recipe, int | None]:
        merged = RecipeRequest(*request).read_with_defaults()
        return merged.recipe, merged.samples

    used, images = training_recipe(None, named)
    assert images == IMAGES and used == recipe_for(IMAGES, {"data.path": "data"}, side=10)
    assert used.model.name == "vit_tiny_patch2_10"
    streamed, images = training_recipe(None, {}, list(STREAM))
    assert images == 77 and streamed.train.epochs == used.train.epochs and streamed.augment.mixup == 0
    assert training_recipe(None, {}) == (read_recipe(DEFAULT_RECIPE), None)
    file = Path("recipe.toml")
    assert training_recipe(file, named) == (read_recipe(file, {"data.path": "data"}), None)
    begun, images = training_recipe(None, {**named, "model.weights": "weights"}, ["train.steps=1"])
    assert images is None and begun.optimizer.lr == 1e-4 and begun.lr_schedule.warmup is None
    rows = [
        (["--weights", "w"], "--weights 'w' does not exist: name a folder of weights"),
        (["--model", "vit_nano_patch16_4096", "--batch-size", "16000000"], "of 4096 pixels needs 805,306 GB of memory"),
        (["--model", "vit_base_patch16_224", "--batch-size", "100000"], "use a smaller --batch-size"),
    ]
    refused(place, rows, "train", "--data", "data")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine whose only device is a GPU that computes in bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))


def test_plan_uses_the_precision_of_the_device(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitpar_cli.plan import plan

    words = ("dp2", "--model", MODEL)
    assert json.loads(printed(plan, *words, "--json"))["precision"] == "bf16"
    assert ", 2 ranks, bf16" in printed(plan, *words)
    assert json.loads(printed(plan, *words, "--json", "--precision", "fp64"))["precision"] == "fp64"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert json.loads(printed(plan, *words, "--json"))["precision"] == "fp32"


class Resolved(Exception):
    """Exception that ends a command once its recipe is resolved."""


def test_all_commands_resolve_the_precision_but_a_resumed_run_keeps_its_own(
    place: Path, default_run: tuple[Path, str], one_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitpar.recipe import machine
    from vitpar_cli import bench, check, evaluate, profile, train

    resolve, seen = machine.replace_auto_precision, []

    def noted(recipe: Any, device: str) -> Any:
        seen.append((recipe.train.precision, resolve(recipe, device).train.precision))
        return resolve(recipe, device)

    def end(kernel: str, device: str) -> None:
        raise Resolved

    monkeypatch.setattr(machine, "replace_auto_precision", noted)
    monkeypatch.setattr(machine, "refuse_attention", end)
    monkeypatch.chdir(place)
    calls: list[tuple[Any, tuple[str, ...]]] = [
        (train.train, ("--data", "data")),
        (check.check, ("--mesh", "dp1")),
        (bench.bench, ("--model", MODEL)),
        (evaluate.evaluate, ("--checkpoint", "run/weights", "--set", "train.precision=auto")),
        (profile.model, ("--model", MODEL)),
        (train.train, ("--resume", "run")),
        (train.train, ("--resume", "run", "--recipe", "recipe.toml")),
    ]
    for function, words in calls:
        with pytest.raises(Resolved):
            printed(function, *words)
    assert seen == [("auto", "bf16")] * 5 + [("fp32", "fp32")] * 2


def test_search_assumes_the_clusters_precision_and_says_so(tmp_path: Path) -> None:
    from vitpar_cli.search import search

    shipped = (files("vitpar") / "clusters" / "A100-80GB.toml").read_text()
    place = "nodes = 1\ndevices_per_node = 2\n"
    (tmp_path / "old.toml").write_text(place + shipped.replace("bfloat16 = 312e12\n", ""))
    words = ("--model", "vit_tiny_patch4_32", "--batch-size", "64", "--roles", "dp")
    for cluster, precision in (("2xH100", "bf16"), (str(tmp_path / "old.toml"), "fp32")):
        assumed = printed(search, "--cluster", cluster, *words)
        assert f"precision {precision} is assumed: set another with --precision" in assumed
        assert f"vit_tiny_patch4_32 in {precision}" in assumed
    named = printed(search, "--cluster", "2xH100", *words, "--precision", "fp32")
    assert "vit_tiny_patch4_32 in fp32" in named and "set another with --precision" not in named


def test_folder_of_images_is_packed_once(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, target = tmp_path / "photos", tmp_path / "data_shards" / "photos"
    shutil.copytree(place / "source" / "train", photos)
    words = "pack photos data_shards/photos` and give"
    rows = [(["--task", "mlm"], words), (["--dry-run"], f"{words} data_shards/photos")]
    refused(tmp_path, rows, "train", "--data", "photos")
    for change, said in (
        (lambda: None, "packing    photos into data_shards/photos\n"),
        (lambda: None, "packed from photos before; no file has changed since"),
        (
            lambda: os.utime(photos / "class0" / "0.png", (1, 1)),
            "packing    photos into data_shards/photos, since files changed",
        ),
        # A packing that was killed leaves nothing that is trained on.
        (lambda: (target / RECORD).unlink(), "error"),
    ):
        change()
        if said == "error":
            with pytest.raises(DataError, match="where other data are"):
                packed(Path("photos"))
            continue
        assert packed(Path("photos")) == Path("data_shards/photos")
        assert said in capsys.readouterr().out
    shutil.rmtree(target)
    packed(Path("photos"))
    assert packed(photos) == Path("data_shards/photos")
    assert "no file has changed since" in capsys.readouterr().out, "whether the path is relative or not"
    (photos / "class0" / "gone.png").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"'photos' cannot be packed: photos/class0/gone.png: No such file"):
        packed(Path("photos"))
    (photos / "class0" / "gone.png").unlink()
    assert packed(place / "data") == place / "data" and packed(Path("not/here")) == Path("not/here")
    shutil.rmtree(target)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with pytest.raises(DataError, match=r"packing 'photos' needs 0\.\d+ MB, but 'data_shards' has 0\.01 MB left"):
        packed(Path("photos"))
