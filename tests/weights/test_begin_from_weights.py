"""Runs that start from imported weights, and `vitpar import`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from typer.testing import CliRunner

from helpers.command_line import Refused, run
from helpers.foreign_weights import CLASSES, TIMM_CONFIG, WIDTH, saved, timm_state
from helpers.ranks import RankPool
from helpers.small_data import pack_small
from helpers.trained import trainer_of
from vitpar.errors import DataError
from vitpar.models.initial import initial_value
from vitpar.recipe import Recipe, read_recipe
from vitpar.strategy import parse
from vitpar.weights.folder import RECIPE, open_weights
from vitpar.weights.importing import import_weights, resampled
from vitpar_cli.checkpoint import app


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed data and imported weights."""
    folder = tmp_path_factory.mktemp("place")
    pack_small(folder).rename(folder / "data")
    saved(folder / "there", timm_state(), TIMM_CONFIG)
    import_weights(folder / "there", folder / "weights")
    return folder


def test_import_and_eval_from_the_command_line(place: Path) -> None:
    words = ["import", str(place / "there"), "--out", str(place / "again"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["format"] == "timm"
    # The last line is the next command: a new classifier has to be trained first.
    for options, use in (((), "eval --checkpoint"), (("--classes", "3"), "train --weights")):
        folder = str(place / f"for {use}")
        shown = CliRunner().invoke(app, ["import", str(place / "there"), "--out", folder, *options])
        assert shown.stdout.splitlines()[-1] == f"vitpar {use} '{folder}' --data DIR"
    evaluated = run(place, ["eval", "--checkpoint", "again", "--data", "data", "--json"])
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["samples"] == 17


def recipe_from(place: Path, mesh: str, **changed: Any) -> Recipe:
    values = {"data.path": str(place / "data"), "data.workers": 0, "train.batch_size": 12, "train.ema_decay": 0.9}
    values |= {"parallel.mesh": mesh, "train.steps": 1, "model.weights": str(place / "weights")}
    values["model.init"] = "moco"  # so that a new classifier is not zero
    if mesh.startswith("pp"):
        values["parallel.microbatches"] = 2
    return read_recipe(place / "weights" / RECIPE, {**values, **changed})


def begun(device: torch.device, recipe: Recipe, run_dir: Path) -> list[str]:
    """Return this rank's parameters and averages that differ from the recipe's weights at the start; then train."""
    trainer = trainer_of(recipe, run_dir)
    weights, wrong = open_weights(Path(recipe.model.weights or "")), []
    for name, tensor in trainer.state.tensors().items():
        group, _, name = name.partition(".")
        if group == "optimizer":
            continue
        whole, mine = weights.read(name), tensor
        if name == "embed.pos_embed" and trainer.config.image_size != weights.config.image_size:
            whole = resampled(whole, trainer.config.prefix_tokens, trainer.config.image_size // 4)
        if isinstance(tensor, DTensor):
            mine, place = tensor.to_local(), (tensor.device_mesh, tensor.placements)
            whole = distribute_tensor(whole, *place, src_data_rank=None).to_local()
        if whole.shape != mine.shape or not torch.equal(mine, whole):
            wrong.append(f"{group}.{name}")
    trainer.run()
    return wrong


@pytest.mark.parametrize("mesh", ["fsdp2", "pp2xtp2"])
def test_run_starts_from_weights_under_any_plan(
    mesh: str, place: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    recipe = recipe_from(place, mesh)
    assert ranks(parse(mesh).world_size).run(begun, recipe, tmp_path / "run") == [[]] * parse(mesh).world_size
    assert read_recipe(tmp_path / "run" / RECIPE).model.weights == str(place / "weights")
    assert "parameters are loaded from" in (tmp_path / "run" / "log.txt").read_text()


def test_position_embeddings_are_interpolated_for_larger_images(
    place: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    recipe = recipe_from(place, "tp2", **{"model.image_size": 12, "data.mean": [0.1, 0.1, 0.1]})
    assert ranks(2).run(begun, recipe, tmp_path / "run") == [[]] * 2
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "interpolated from 2x2 to 3x3" in log and "normalised with mean (0.1" in log


def test_classifier_of_another_size_is_initialised_anew(place: Path, tmp_path: Path, alone: None) -> None:
    import_weights(place / "there", tmp_path / "five", classes=5)
    recipe = recipe_from(place, "dp1", **{"model.weights": str(tmp_path / "five"), "train.seed": 3})
    trainer = trainer_of(recipe, tmp_path / "run")
    parameters = dict(trainer.model.named_parameters())
    fresh = initial_value("head.fc.weight", torch.Size((CLASSES, WIDTH)), 3, trainer.config)
    assert torch.equal(parameters["head.fc.weight"], fresh)
    assert torch.equal(parameters["head.norm.bias"], timm_state()["norm.bias"])
    trainer.run()
    assert (
        "classifier of 7 classes is newly initialised (the weights have 5)"
        in (tmp_path / "run" / "log.txt").read_text()
    )


def test_run_starts_from_a_checkpoint(place: Path, tmp_path: Path, alone: None) -> None:
    trainer_of(recipe_from(place, "dp1"), tmp_path / "first").run()
    checkpoint = tmp_path / "first" / "checkpoints" / "step_1"
    recipe = recipe_from(place, "dp1", **{"model.weights": str(checkpoint), "model.image_size": 12})
    assert begun(torch.device("cpu"), recipe, tmp_path / "second") == []


def test_resumed_run_does_not_read_the_initial_weights(place: Path, tmp_path: Path, alone: None) -> None:
    shutil.copytree(place / "weights", tmp_path / "weights")
    recipe = recipe_from(
        place, "dp1", **{"model.weights": str(tmp_path / "weights"), "train.steps": 4, "checkpoint.every": 2}
    )
    trainer = trainer_of(recipe, tmp_path / "run")
    trainer.total_steps = 2
    trainer.run()
    shutil.rmtree(tmp_path / "weights")
    other = recipe_from(place, "dp1", **{"model.weights": "elsewhere", "train.steps": 4, "checkpoint.every": 2})
    with pytest.raises(ValueError, match=r"model\.weights was .* and is elsewhere.*--allow-change model\.weights"):
        trainer_of(other, tmp_path / "run", resume=tmp_path / "run")
    trainer_of(recipe, tmp_path / "run", resume=tmp_path / "run").run()
    found = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in found if row["kind"] != "event"]
    assert max(steps) == 4
    with pytest.raises(DataError, match="holds no weights"):
        trainer_of(recipe, tmp_path / "other")
    assert not (tmp_path / "other").exists()


OTHER_MODELS = [
    (["--weights", "gone"], "--weights 'gone' does not exist: name a folder of weights"),
    (["--weights", "weights", "--model", "vit_tiny_patch4_8"], "embed_dim is 192 but 24 in the weights"),
    (["--weights", "weights", "--set", "model.pool=avg"], "pool is avg but cls in the weights"),
]


def test_weights_of_another_model_are_refused_before_launch(place: Path, refused: Refused) -> None:
    refused(place, OTHER_MODELS, "train", "--data", "data", "--recipe", "weights/recipe.toml")
    message = "--set model.weights changes nothing in a plan"
    refused(place, [(["plan", "dp1", "--set", "model.weights=weights"], message)])
