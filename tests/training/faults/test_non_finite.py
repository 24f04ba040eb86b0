"""Non-finite losses, gradients and updates: where the run stops, what the error names, and which steps are skipped."""

import math
import re
from pathlib import Path
from typing import Any

import pytest

from helpers import trained
from helpers.command_line import run
from helpers.ranks import Ranks
from helpers.run_folder import rows_of
from helpers.watched import WEIGHT, watched
from vitpar import parse
from vitpar.recipe import Recipe


def recipe_of(data: Path, mesh: str, **settings: Any) -> Recipe:
    values = {
        "train.eval_every": 6,
        "train.batch_size": 8,
        "train.log_every": 10,
        "checkpoint.every": 4,
        "model.depth": 2,
    }
    return trained.recipe_of(data, mesh, **{**values, **settings})


@pytest.mark.parametrize(
    ("mesh", "name", "rank", "where"),
    [
        ("dp2", WEIGHT, 1, f"the gradient of {WEIGHT} on rank 1)"),
        ("pp2", WEIGHT, 1, f"the gradient of {WEIGHT} on rank 1)"),
        ("fsdp2", "loss", 1, "the loss on rank 1)"),
    ],
)
def test_divergence_error_names_step_rank_and_parameter(
    mesh: str, name: str, rank: int, where: str, data: Path, tmp_path: Path, ranks: Ranks
) -> None:
    """The run diverges at a checkpoint's own step, before later steps are logged; that checkpoint is not written."""
    folder = tmp_path / "run"
    answers = ranks(parse(mesh).world_size).run(watched, recipe_of(data, mesh), folder, math.nan, rank, (4,), name)
    sentences = {error for _, error in answers}
    assert len(sentences) == 1, sentences
    (sentence,) = sentences
    assert sentence is not None and sentence.startswith("the training diverged at step 4 (loss ")
    assert f"; not finite: {where}: lower optimizer.lr" in sentence
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]
    assert not list((folder / "checkpoints").glob("*"))
    assert sentence in (folder / "log.txt").read_text()


LATER = {"train.log_every": 100, "checkpoint.every": 5}
LATE = [
    # No update was done, so no learning rate is to blame.
    (
        "dp2",
        LATER,
        WEIGHT,
        0,
        1,
        math.nan,
        r"the training diverged at step 1 .*: no update .*, data.std \[.*model.weights",
    ),
    # When step 5 is due to be saved, the gradients of step 4 are NaN too; the error names step 3, the first one.
    ("dp2", LATER, WEIGHT, 0, 3, math.inf, f"the training diverged at step 3 .*gradient of {WEIGHT} on rank 0"),
    # Loss and gradients of step 4 are finite but its update is not: the run stops before evaluation and checkpoint.
    (
        "fsdp2",
        {"train.eval_every": 4},
        "update",
        1,
        4,
        math.inf,
        f"the update of step 4 .*first in {WEIGHT} on rank 1, ",
    ),
]


@pytest.mark.parametrize(("mesh", "settings", "name", "rank", "step", "value", "words"), LATE)
def test_nothing_non_finite_is_evaluated_or_saved(
    mesh: str,
    settings: dict[str, Any],
    name: str,
    rank: int,
    step: int,
    value: float,
    words: str,
    data: Path,
    tmp_path: Path,
    ranks: Ranks,
) -> None:
    arguments = (recipe_of(data, mesh, **settings), tmp_path / "run", value, rank, (step,), name)
    for seen, error in ranks(2).run(watched, *arguments):
        assert error is not None and re.match(words, error), error
        assert name == "update" or not seen[-1]["finite"], "nothing was spoilt"
    assert rows_of(tmp_path / "run", "eval") == []
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


@pytest.mark.parametrize("name", [WEIGHT, "loss"])
def test_skipped_step_changes_no_parameter(name: str, data: Path, tmp_path: Path, ranks: Ranks) -> None:
    """The checkpoints and the log must also show which steps were skipped and why."""
    folder = tmp_path / "run"
    recipe = recipe_of(
        data, "tp2", **{"faults.non_finite": "skip"}, **{"faults.max_skipped": 3}, **{"train.ema_decay": 0.9}
    )
    for seen, error in ranks(2).run(watched, recipe, folder, math.nan, 1, (2, 3, 5), name):
        assert error is None, error
        assert [step["same"] for step in seen] == [False, True, True, False, True, False]
    rows = rows_of(folder)
    assert [row["skipped"] for row in rows] == [False, True, True, False, True, False]
    bad = (rows[1]["bad_loss_ranks"], rows[1]["bad_gradient"], rows[1]["bad_ranks"])
    assert bad == (([1], None, []) if name == "loss" else ([], WEIGHT, [1]))
    words = "the loss on rank 1" if name == "loss" else f"the gradient of {WEIGHT} on rank 1"
    assert f"skipped step 2: not finite: {words}\n" in (folder / "log.txt").read_text()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_4", "step_6"}


def test_too_many_skipped_steps_in_a_row_stop_the_run(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    folder = tmp_path / "run"
    recipe = recipe_of(data, "dp2", **{"faults.non_finite": "skip"}, **{"faults.max_skipped": 2})
    for seen, error in ranks(2).run(watched, recipe, folder, math.nan, 1, (2, 4, 5), WEIGHT):
        assert error is not None and error.startswith("2 steps in a row were skipped, the last at step 5 (")
        assert f"the gradient of {WEIGHT} on rank 1" in error and "faults.max_skipped" in error
        assert seen[-1]["finite"]
    assert [row["skipped"] for row in rows_of(folder)] == [False, True, False, True, True]
    folder, recipe = tmp_path / "in_vain", recipe_of(data, "dp2", **{"faults.non_finite": "skip"})
    for _, error in ranks(2).run(watched, recipe, folder, math.nan, 1, range(1, 7), WEIGHT):
        assert (
            error is not None
            and "no update was done yet" in error
            and error.startswith("every step was skipped (not finite: the gradient of")
        )
    assert len(rows_of(folder)) == 6 and not (folder / "weights").exists()


@pytest.mark.slow
def test_skip_mode_does_not_change_a_finite_run(data: Path, tmp_path: Path, ranks: Ranks) -> None:
    losses = []
    for way in ("stop", "skip"):
        recipe = recipe_of(data, "fsdp2", **{"faults.non_finite": way})
        ranks(2).run(watched, recipe, tmp_path / way)
        losses.append([(row["loss"], row["grad_norm"]) for row in rows_of(tmp_path / way)])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_diverging_run_ends_with_one_error_line(data: Path, tmp_path: Path) -> None:
    """A learning rate of 1e30 on the command line diverges; the program prints one line and leaves no checkpoint."""
    (tmp_path / "recipe.toml").write_text(
        recipe_of(data, "dp2", **{"optimizer.name": "sgd"}, **{"optimizer.lr": 1e30}).to_toml()
    )
    done = run(tmp_path, ["train", "--recipe", "recipe.toml", "--run-dir", "run"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: the ") and done.stderr.count("\n") == 1, done.stderr
    assert "diverged" in done.stderr or "not finite" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))
