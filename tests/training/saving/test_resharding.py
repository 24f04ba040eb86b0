"""Checkpoints across plans and batch sizes: each plan loads what another saved, with the losses of an unstopped run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from helpers.command_line import Command
from helpers.ranks import Ranks
from helpers.trained import LAYERWISE, PLANS, STEPS, assembled, recipe_of, recipe_text, rows, train, trainer_of
from vitpar.recipe import Recipe
from vitpar.strategy import parse
from vitpar.training.trainer import Trainer

OPTIMIZERS: tuple[dict[str, Any], ...] = (
    {"name": "muon", "momentum": 0.9},
    {"name": "adafactor"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "lamb"},
    {"name": "adamw"},
    {"name": "lion"},
)
RANDOM = {"model.dropout": 0.1, "model.drop_path": 0.1, "augment.mixup": 0.8, "augment.policy": "3a"}


def compared(trainer: Trainer, checkpoint: Path) -> tuple[list[str], list[str]]:
    """Return the names of this rank's tensors, and of those that differ from this rank's part of the checkpoint."""
    files, names, wrong = assembled(checkpoint), [], []
    for name, tensor in trainer.state.tensors().items():
        mine, whole = tensor, files[name]
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            mine = tensor.to_local()
        names.append(name)
        if not torch.equal(mine, whole):
            wrong.append(name)
    return names, wrong


# another plan


def written(device: torch.device, recipe: Recipe, run_dir: Path) -> tuple[list[str], list[str]]:
    """Train and save under `recipe`; return what `compared` finds."""
    trainer = trainer_of(recipe, run_dir)
    trainer.total_steps = STEPS
    trainer.run()
    return compared(trainer, trainer.saver.checkpoints.path(STEPS))


def moved(device: torch.device, recipe: Recipe, run_dir: Path, checkpoint: Path) -> tuple[list[str], list[str]]:
    """Resume from `checkpoint` and train to the end; return what `compared` finds before the first step."""
    trainer = trainer_of(recipe, run_dir, resume=checkpoint)
    found = compared(trainer, checkpoint)
    trainer.run()
    return found


def check_move(writes: str, reads: str, settings: dict[str, Any], data: Path, folder: Path, ranks: Ranks) -> None:
    """Check that `reads` loads the checkpoint of `writes` bit for bit, and that both continue with the same losses."""
    first, second = (recipe_of(data, mesh, **settings) for mesh in (writes, reads))
    if not (folder / "first").exists():
        found = ranks(parse(writes).world_size).run(written, first, folder / "first")
        assert {name for _, wrong in found for name in wrong} == set()
        ranks(parse(writes).world_size).run(train, first, folder / "stayed", resume=folder / "first")
    checkpoint = folder / "first" / "checkpoints" / f"step_{STEPS}"
    found = ranks(parse(reads).world_size).run(moved, second, folder / "moved", checkpoint)
    assert {name for _, wrong in found for name in wrong} == set()
    assert {name for names, _ in found for name in names} == set(assembled(checkpoint)), "something was not read"
    stayed, gone = rows(folder / "stayed"), rows(folder / "moved")
    assert [row["step"] for row in stayed] == list(range(STEPS + 1, 2 * STEPS + 1)) == [row["step"] for row in gone]
    for one, other in zip(stayed, gone, strict=True):
        assert (other["samples"], other["samples_crc32"]) == (one["samples"], one["samples_crc32"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    shutil.rmtree(folder / "moved")


CIRCLE = ["dp1", "fsdp3", "pp2xtp2xdp2", "dp4+zero2", LAYERWISE, "tp2xdp2+sp"]


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[pytest.mark.slow] * (number > 2), id=f"{mesh} to next")
        for number, mesh in enumerate(CIRCLE)
    ],
)
def test_each_plan_loads_the_checkpoint_of_another(number: int, data: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The tensors are equal bit for bit, and both plans continue with the same losses, for every optimizer."""
    optimizer = OPTIMIZERS[number % len(OPTIMIZERS)]
    settings = {f"optimizer.{key}": value for key, value in optimizer.items()} | {"optimizer.lr": 1e-3}
    check_move(CIRCLE[number], CIRCLE[(number + 1) % len(CIRCLE)], settings, data, tmp_path, ranks)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("writes", PLANS)
def test_every_plan_loads_the_checkpoint_of_every_plan(writes: str, data: Path, tmp_path: Path, ranks: Ranks) -> None:
    for reads in PLANS:
        check_move(writes, reads, {}, data, tmp_path, ranks)


# the same plan


@pytest.mark.each_row
@pytest.mark.parametrize(("mesh", "precision"), [("pp2", "fp32"), ("fsdp2", "fp16"), ("dp1", "bf16")])
def test_resumed_run_is_bitwise_equal_to_an_unstopped_run(
    mesh: str, precision: str, data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """Dropout, augmentation, mixup, weight decay and the loss scale must continue exactly where they stopped."""
    # An initial loss scale that overflows, so that the scaler has state to restore.
    scale = {"loss_scale.initial_scale": 2.0**24, "loss_scale.hysteresis": 1} if precision == "fp16" else {}
    settings = {**RANDOM, **scale, "model.depth": 2, "train.precision": precision, "train.eval_every": STEPS}
    settings["optimizer.weight_decay_end"] = 5.0
    pool, recipe = ranks(parse(mesh).world_size), recipe_of(data, mesh, **settings)
    pool.run(train, recipe, tmp_path / "through")
    shutil.copytree(tmp_path / "through", tmp_path / "stopped")
    stopped = tmp_path / "stopped"
    shutil.rmtree(stopped / "checkpoints" / f"step_{2 * STEPS}")
    shutil.rmtree(stopped / "weights")
    pool.run(train, recipe, stopped, resume=stopped)
    for kind in ("train", "eval"):
        assert rows(stopped, kind) == rows(tmp_path / "through", kind)
    last = f"checkpoints/step_{2 * STEPS}"
    one, other = (assembled(run / last) for run in (tmp_path / "through", stopped))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


RECIPE = recipe_text(
    **{"model.depth": 2, "data.path": "data", "train.batch_size": 8, "train.steps": 8, "train.log_every": 1},
    **{"lr_schedule.warmup": 2, "checkpoint.every": 4, "checkpoint.keep": 5},
    **{"optimizer.weight_decay": 0.04, "optimizer.weight_decay_end": 0.4},
)


@pytest.mark.parametrize("batch", [4, 16])
def test_length_in_steps_counts_images(batch: int, place: Path, vitpar: Command) -> None:
    if not (place / "run").exists():
        assert vitpar("train", "--recipe", "recipe.toml", "--run-dir", "run").returncode == 0
    words = ("--resume", "run/checkpoints/step_4", "--batch-size", str(batch), "--allow-change", "train.batch_size")
    done = vitpar("train", *words, "--run-dir", f"batch{batch}")
    assert done.returncode == 0, done.stderr
    promised, found = (rows(place / name) for name in ("run", f"batch{batch}"))
    assert [row["samples"] for row in found] == list(range(4 * 8 + batch, 8 * 8 + 1, batch))
    for name in ("lr", "weight_decay"):
        values = {row["samples"] - 8: row[name] for row in promised}  # by the images before the step
        shared = [row for row in found if row["samples"] - batch in values]
        assert shared and [row[name] for row in shared] == pytest.approx([values[r["samples"] - batch] for r in shared])
