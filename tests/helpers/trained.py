"""Small runs with checkpoints under any plan, and the contents of the checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vitpar.checkpoint.index import Index, read_index
from vitpar.recipe import Recipe, read_recipe
from vitpar.recipe.machine import replace_auto_precision
from vitpar.tasks import task_of
from vitpar.tasks.data import open_data
from vitpar.training.events import Reporter
from vitpar.training.prepare import Prepared
from vitpar.training.trainer import Trainer

CPU = torch.device("cpu")
STEPS = 3
LAYERWISE = "pp2: embed=fsdp2, 0-1=tp2, 2=dp2, *=fsdp2"
PLANS: dict[str, dict[str, Any]] = {
    "dp1": {},
    "dp4+zero2": {},
    "tp4xfsdp2+2d": {},
    "fsdp3": {},
    "pp2xtp2xdp2": {"microbatches": 2},
    "tp8+3d": {},
    "pp2xfsdp2": {"schedule": "zbvzerobubble", "virtual_stages": 2},
    "tp2xdp2+sp": {},
    "fsdp2xtp2+ckpt": {},
    LAYERWISE: {"microbatches": 2},
}


MODEL: dict[str, Any] = {
    **{"model.name": "vit_custom", "model.image_size": 8, "model.patch_size": 4, "model.embed_dim": 24},
    **{"model.depth": 4, "model.num_heads": 4},
    "model.init": "moco",  # every parameter has a gradient from the first step on
}
"""Settings of the model of small runs."""


def recipe_text(**settings: Any) -> str:
    """Return a recipe file with MODEL and other settings, by their keys. More sections can follow.

    None leaves a setting out.
    """
    given = {key: value for key, value in (MODEL | settings).items() if value is not None}
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items())


def recipe_of(data: Path, mesh: str, **changed: Any) -> Recipe:
    values: dict[str, Any] = {**MODEL}
    values |= {"data.path": str(data), "data.workers": 0, "parallel.mesh": mesh, "train.batch_size": 24}
    values |= {"train.steps": 2 * STEPS, "train.ema_decay": 0.9, "checkpoint.every": STEPS, "checkpoint.keep": 0}
    values |= {f"parallel.{key}": value for key, value in PLANS.get(mesh, {}).items()}
    if any(key.startswith("checkpoint.every") for key in changed):
        del values["checkpoint.every"]
    return read_recipe(None, {**values, **changed})


def prepared(recipe: Recipe, **more: Any) -> Prepared:
    """Return a run of `recipe` without the checks of `prepare`. more: further fields of `Prepared`."""
    recipe = replace_auto_precision(recipe, "cpu")
    train_set, val_set = open_data(recipe)
    task = task_of(recipe, train_set)
    config = recipe.config(task.outputs, task.model_options)
    return Prepared(recipe, config, task, recipe.plan(config), train_set, val_set, **more)


def trainer_of(recipe: Recipe, run_dir: Path, **more: Any) -> Trainer:
    for_run = {name: more.pop(name) for name in ("resume", "allow_change") if name in more}
    run = prepared(recipe, run_dir=run_dir, **for_run)
    trainer = Trainer(run, CPU, reporter=Reporter(), **more)
    return trainer


def train(device: torch.device, recipe: Recipe, run_dir: Path, **more: Any) -> None:
    """Run `recipe` to its end; runs on every rank."""
    trainer_of(recipe, run_dir, **more).run()


def rows(run: Path, kind: str = "train", after: int = 0) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl of one kind after step `after`, without timings and memory."""
    every = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    timed = ("time", "step_ms", "data_ms", "images_per_second", "memory_bytes", "memory_by_rank")
    kept = [row for row in every if row["kind"] == kind and row["step"] > after]
    return [{key: value for key, value in row.items() if key not in timed} for row in kept]


def assembled(checkpoint: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, assembled from its files without vitpar's reader."""
    index = json.loads((checkpoint / "index.json").read_text())
    wholes = {}
    for name, stored in index["tensors"].items():
        whole = torch.full(stored["shape"], torch.nan, dtype=getattr(torch, stored["dtype"]))
        for part in stored["parts"]:
            shard, offsets, sizes = part
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            with safe_open(checkpoint / index["shards"][shard], framework="pt") as file:
                whole[box] = file.get_tensor(name)
        wholes[name] = whole
    return wholes


def changed(path: Path, change: Callable[[Index], None]) -> None:
    """Apply `change` to the index and rewrite it with a matching checksum."""
    index = read_index(path)
    change(index)
    index.crc32 = index.checksum
    (path / "index.json").write_text(index.model_dump_json())
