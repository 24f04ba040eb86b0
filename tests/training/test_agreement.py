"""Ranks that would train different things are refused before a model is built."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import Ranks
from helpers.small_data import pack_small, rename_classes
from helpers.trained import recipe_of, trainer_of
from vitpar.data.shards.shard_set import ShardSet
from vitpar.errors import RecipeError
from vitpar.recipe import read_recipe
from vitpar.strategy import parse
from vitpar.training.build import refuse_disagreement
from vitpar.weights.folder import fingerprint

BASE: dict[str, Any] = {
    "data.path": "data",
    "train.steps": 2,
    "train.batch_size": 8,
    "model.name": "vit_tiny_patch16_224",
    "train.precision": "fp32",
}
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"train.seed": 5}, "train.seed is 0 on ranks 0 and 2 and 5 on rank 1: give all ranks the same"),
    "batch": ({"train.batch_size": 4}, "train.batch_size is 8 on ranks 0 and 2 and 4 on rank 1"),
    "augmentation": ({"augment.mixup": 0.5}, "augment.mixup is 0.0 on ranks 0 and 2 and 0.5 on rank 1"),
    "precision": ({"train.precision": "bf16"}, 'train.precision is "fp32" on ranks 0 and 2 and "bf16" on rank 1'),
    "cache": ({"data.cache": "memory"}, 'data.cache is "none" on ranks 0 and 2 and "memory" on rank 1'),
    "log": ({"train.log_every": 7}, "train.log_every is"),
    "saves": ({"checkpoint.every": 7}, "checkpoint.every is"),
    "model": ({"model.embed_dim": 96}, "model.embed_dim is null on ranks 0 and 2 and 96 on rank 1"),
    "data": ({"data": "moved"}, "the content of the training data is"),
    "classes": ({"data": "named"}, "the classes of the training data is"),
    "plan": ({"plan": "tp3"}, "the plan is"),
    "weights": ({"weights": "b"}, "the content of model.weights is"),
    "nothing": ({}, ""),
    "local settings": ({"data.path": "elsewhere", "data.workers": 3}, ""),
}


def opened(device: torch.device, place: Path) -> str:
    """Return the error of a run whose ranks are given other folders; empty for none."""
    try:
        trainer_of(recipe_of(place / "data", "dp3"), place / f"run{dist.get_rank()}")
    except RecipeError as error:
        return str(error)
    return ""


def compared(device: torch.device, place: Path, changed: dict[str, Any]) -> str:
    """Return the error of this rank, empty for none. Only rank 1 has the changed settings."""
    changed = changed if dist.get_rank() == 1 else {}
    named = {"data": "data", "plan": "dp3", "weights": "a"} | changed
    recipe = read_recipe(None, {**BASE, **{key: value for key, value in changed.items() if "." in key}})
    data = {"the training data": ShardSet.open(place / named["data"], "train"), "the validation data": None}
    try:
        weights = {"the content of model.weights": fingerprint(place / named["weights"])}
        refuse_disagreement(recipe, parse(named["plan"]), data, weights)
    except RecipeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, and small folders in place of weights."""
    folder = tmp_path_factory.mktemp("content")
    pack_small(folder).rename(folder / "data")
    for name in ("moved", "named"):
        shutil.copytree(folder / "data", folder / name)
    classes = [f"class{label}" for label in range(7)]
    rename_classes(folder / "moved", classes, [1, 0, 2, 3, 4, 5, 6])
    rename_classes(folder / "named", classes[::-1])
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"0" * (3 << 20) + name.encode())
        (folder / name / "recipe.toml").write_text(name)
    return folder


@pytest.mark.parametrize("name", DIFFERENCES)
def test_differences_are_named_on_every_rank(name: str, content: Path, ranks: Ranks) -> None:
    changed, words = DIFFERENCES[name]
    found = ranks(3).run(compared, content, changed)
    assert len({*found}) == 1 and words in found[0] and bool(found[0]) == bool(words), found


def test_another_run_folder_of_a_rank_is_refused(content: Path, ranks: Ranks) -> None:
    (found,) = {*ranks(3).run(opened, content)}
    assert found.startswith("ranks disagree: --run-dir is ") and "run0" in found and "run2" in found
    assert not list(content.glob("run?"))
