"""Training on a data set that has no val split: the same steps, no evaluation."""

from pathlib import Path

import pytest

from helpers.small_data import pack_small
from helpers.trained import recipe_of, rows, trainer_of
from vitpar.errors import RecipeError


def test_a_data_set_without_val_trains_alike_and_is_not_evaluated(tmp_path: Path, alone: None) -> None:
    losses = []
    for val in (True, False):
        data = pack_small(tmp_path / str(val), val=val)
        run = tmp_path / f"run-{val}"
        summary = trainer_of(recipe_of(data, "dp1"), run).run()
        losses.append([row["loss"] for row in rows(run)])
        assert len(rows(run, "eval")) == (6 if val else 0) and ("top1" in summary) == val
    assert losses[0] == losses[1] and len(losses[0]) == 6
    assert "not evaluated" in (tmp_path / "run-False/log.txt").read_text()


def test_the_best_checkpoint_needs_a_val_split(tmp_path: Path, alone: None) -> None:
    data = pack_small(tmp_path, val=False)
    with pytest.raises(RecipeError, match=r"checkpoint.keep_best needs evaluations, but .* has no val split"):
        trainer_of(recipe_of(data, "dp1", **{"checkpoint.keep_best": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
