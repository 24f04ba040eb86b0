"""Non-finite losses, gradients and updates: where the run stops, what the error names, and which steps are skipped."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.command_line import run
from helpers.ranks import RankPool
from vitpar import parse
from vitpar.errors import RecipeError
from vitpar.sharded import local
from vitpar.training.recipe import Recipe, read_recipe

CPU = torch.device("cpu")


def recipe_of(data: Path, mesh: str, **settings: Any) -> Recipe:
    sizes = {"name": "vit_custom", "image_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2}
    sizes["init"] = "moco"  # every parameter has a gradient from the first step on
    values: dict[str, Any] = {f"model.{key}": value for key, value in sizes.items()}
    values |= {"data.path": str(data), "data.workers": 0, "parallel.mesh": mesh, "train.batch_size": 8}
    values |= {"train.steps": 6, "train.eval_every": 6, "train.log_every": 10, "checkpoint.every_steps": 4}
    return read_recipe(None, {**values, **{key.replace("__", "."): value for key, value in settings.items()}})


def spoilt(
    device: torch.device, recipe: Recipe, folder: Path, name: str, rank: int, steps: tuple[int, ...], value: float
) -> tuple[str | None, dict[str, Any]]:
    """Train with a fault on `rank` in `steps`.

    Return the error that stopped the run, and parameter sums after each step.
    Runs on every rank.

    name: parameter whose reduced gradient gets `value`; "loss" multiplies the loss by it; "update" writes it into a
    parameter after the update
    """
    from vitpar.training import trainer as trainer_file
    from vitpar.training.events import Reporter
    from vitpar.training.trainer import Trainer

    trainer = Trainer(recipe, recipe.plan(recipe.config(7)), CPU, reporter=Reporter(), run_dir=folder)
    backward, step = trainer.model.forward_backward, trainer.step
    now = [0]
    sums: dict[str, Any] = {}

    def spoil(*args: Any) -> Tensor:
        loss = backward(*args)
        if now[0] in steps and trainer.rank == rank:
            if name in ("loss", "update"):
                return loss * value if name == "loss" else loss
            local(dict(trainer.model.named_parameters())[name].grad).view(-1)[0] = value
        return loss

    def watched(number: int, batch: Any) -> Any:
        now[0] = number
        result = step(number, batch)
        if name == "update" and number in steps and trainer.rank == rank:
            local(dict(trainer.model.named_parameters())[WEIGHT].detach()).view(-1)[0] = value
        sums[str(number)] = [float(local(p.detach()).double().sum()) for _, p in trainer.model.named_parameters()]
        return result

    trainer.model.forward_backward, trainer.step = spoil, watched  # type: ignore[method-assign]
    patch = pytest.MonkeyPatch()
    patch.setattr(trainer_file, "LOOK_S", 1e9)  # ranks read losses only at the log interval
    try:
        trainer.run()
    except RecipeError as error:
        return str(error), sums
    finally:
        patch.undo()
    return None, sums


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


WEIGHT = "blocks.1.mlp.fc1.weight"


@pytest.mark.parametrize(
    ("mesh", "name", "rank", "where"),
    [
        ("dp2", WEIGHT, 1, f"the gradient of {WEIGHT} on rank 1)"),
        ("pp2xtp2", WEIGHT, 3, f"the gradient of {WEIGHT} on rank 3)"),
        ("fsdp2", "loss", 1, "the loss on rank 1)"),
    ],
)
def test_divergence_error_names_step_rank_and_parameter(
    mesh: str, name: str, rank: int, where: str, data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """The run diverges at a checkpoint's own step, before later steps are logged; that checkpoint is not written."""
    folder = tmp_path / "run"
    answers = ranks(parse(mesh).world_size).run(spoilt, recipe_of(data, mesh), folder, name, rank, (4,), math.nan)
    sentences = {error for error, _ in answers}
    assert len(sentences) == 1, sentences
    (sentence,) = sentences
    assert sentence is not None and sentence.startswith("the training diverged at step 4 (loss ")
    assert f"; not finite: {where}: lower optimizer.lr" in sentence
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]
    assert not list((folder / "checkpoints").glob("*"))
    assert sentence in (folder / "log.txt").read_text()


def test_divergence_between_checkpoints_is_found_before_the_next_one(
    data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """When step 5 is due to be saved, the gradients of step 4 are NaN too; the error names step 3, the first one."""
    folder = tmp_path / "run"
    arguments = (
        recipe_of(data, "dp2", train__log_every=100, checkpoint__every_steps=5),
        folder,
        WEIGHT,
        0,
        (3,),
        math.inf,
    )
    for error, sums in ranks(2).run(spoilt, *arguments):
        assert error is not None and "diverged at step 3" in error and f"gradient of {WEIGHT} on rank 0" in error
        assert math.isnan(sums["5"][0]), "nothing was spoilt"
    assert not list((folder / "checkpoints").glob("*"))


def test_non_finite_update_is_neither_evaluated_nor_saved(
    data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """Loss and gradients of step 4 are finite but its update is not: the run stops before evaluation and checkpoint."""
    folder = tmp_path / "run"
    arguments = (recipe_of(data, "fsdp2", train__eval_every=4), folder, "update", 1, (4,), math.inf)
    for error, _ in ranks(2).run(spoilt, *arguments):
        assert error is not None
        assert error.startswith(f"the update of step 4 produced non-finite numbers, first in {WEIGHT} on rank 1, ")
    assert (folder / "metrics.jsonl").read_text().count("\n") == 4, "an evaluation was made"
    assert not list((folder / "checkpoints").glob("*"))


@pytest.mark.parametrize("name", [WEIGHT, "loss"])
def test_skipped_step_changes_no_parameter(
    name: str, data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    """The checkpoints and the log must also show which steps were skipped and why."""
    folder = tmp_path / "run"
    recipe = recipe_of(data, "tp2", faults__non_finite="skip", faults__max_skipped=3, train__ema_decay=0.9)
    for error, sums in ranks(2).run(spoilt, recipe, folder, name, 1, (2, 3, 5), math.nan):
        assert error is None, error
        same = [sums[str(step)] == sums[str(step - 1)] for step in range(2, 7)]
        assert same == [True, True, False, True, False]
    rows = rows_of(folder)
    assert [row["skipped"] for row in rows] == [False, True, True, False, True, False]
    bad = (rows[1]["bad_loss_ranks"], rows[1]["bad_gradient"], rows[1]["bad_ranks"])
    assert bad == (([1], None, []) if name == "loss" else ([], WEIGHT, [1]))
    words = "the loss on rank 1" if name == "loss" else f"the gradient of {WEIGHT} on rank 1"
    assert f"skipped step 2: not finite: {words}\n" in (folder / "log.txt").read_text()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_4", "step_6"}


def test_too_many_skipped_steps_in_a_row_stop_the_run(
    data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of(data, "dp2", faults__non_finite="skip", faults__max_skipped=2)
    answers = ranks(2).run(spoilt, recipe, folder, WEIGHT, 1, (2, 4, 5), math.nan)
    for error, sums in answers:
        assert error is not None and error.startswith("2 steps in a row were skipped, the last at step 5 (")
        assert f"the gradient of {WEIGHT} on rank 1" in error and "faults.max_skipped" in error
        assert all(map(math.isfinite, sums["5"]))
    assert [row["skipped"] for row in rows_of(folder)] == [False, True, False, True, True]


def test_skip_mode_does_not_change_a_finite_run(data: Path, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    losses = []
    for way in ("stop", "skip"):
        recipe = recipe_of(data, "fsdp2", faults__non_finite=way)
        ranks(2).run(spoilt, recipe, tmp_path / way, WEIGHT, 0, (), 0.0)
        losses.append([(row["loss"], row["grad_norm"]) for row in rows_of(tmp_path / way)])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_diverging_run_ends_with_one_error_line(data: Path, tmp_path: Path) -> None:
    """A learning rate of 1e30 on the command line diverges; the program prints one line and leaves no checkpoint."""
    (tmp_path / "recipe.toml").write_text(recipe_of(data, "dp2", optimizer__name="sgd", optimizer__lr=1e30).to_toml())
    done = run(tmp_path, ["train", "--recipe", "recipe.toml", "--run-dir", "run"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ") and done.stderr.count("\n") == 1, done.stderr
    assert "diverged" in done.stderr or "not finite" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"faults__max_skipped": 3}, "faults.max_skipped is 3, but faults.non_finite 'stop' skips nothing"),
        ({"faults__non_finite": "skip", "train__precision": "fp16"}, "which train.precision fp16 always does"),
        (
            {"faults__debug_checks": True, "train__compile": True},
            "faults.debug_checks cannot check compiled blocks",
        ),
        ({"faults__hang_minutes": -1}, "recipe key 'faults.hang_minutes' is -1"),
    ],
)
def test_fault_settings_without_effect_are_refused(settings: dict[str, Any], message: str, data: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(data, "dp1", **settings)
