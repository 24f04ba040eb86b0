"""`vitpar.train`: training from Python, in one process and in an existing process group."""

import builtins
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import vitpar
from helpers.ranks import Ranks
from helpers.trained import STEPS, recipe_of, rows
from vitpar.errors import RecipeError, StrategyError
from vitpar.training.events import Reporter, RunHeader


def in_a_group(device: torch.device, recipe: vitpar.Recipe, run_dir: Path) -> dict[str, Any]:
    """Train in this rank's process group, and check that the group still exists afterwards.

    The environment contradicts the group, as that of an engine may: the main process of Lightning Fabric has no RANK.
    """
    group = dist.group.WORLD
    with patch.dict(os.environ, {"WORLD_SIZE": "7"}):
        for name in ("RANK", "LOCAL_RANK"):
            os.environ.pop(name, None)
        summary = vitpar.train(recipe, device="cpu", run_dir=run_dir)
    assert dist.group.WORLD is group
    return summary


def test_existing_group_gives_the_losses_of_one_process(
    data: Path,
    tmp_path: Path,
    ranks: Ranks,
    environment: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = vitpar.train(recipe_of(data, "dp1"), device="cpu", run_dir=tmp_path / "alone")
    assert capsys.readouterr().out == "", "nobody watches"
    assert not dist.is_initialized(), "the group that it made is gone"
    assert alone["steps"] == 2 * STEPS and Path(alone["weights"]).is_dir()
    folders = tmp_path / "alone" / "checkpoints" / f"step_{2 * STEPS}", alone["weights"]
    saved, final = (vitpar.create_model(weights=folder) for folder in folders)
    assert all((one == two).all() for one, two in zip(saved.parameters(), final.parameters(), strict=True))
    together = ranks(2).run(in_a_group, recipe_of(data, "tp2"), tmp_path / "together")
    assert together[0]["steps"] == together[1]["steps"] == 2 * STEPS
    one, two = (rows(tmp_path / name) for name in ("alone", "together"))
    assert [row["step"] for row in one] == [row["step"] for row in two]
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=1e-4)
    with pytest.raises(vitpar.UserError, match="steps"):
        vitpar.train(
            recipe_of(data, "dp1", **{"train.steps": 7}), run_dir=tmp_path / "alone", resume="auto", device="cpu"
        )
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    for verbose in (None, True, False):
        again = vitpar.train(
            recipe_of(data, "dp1"), run_dir=tmp_path / "alone", resume="auto", device="cpu", verbose=verbose
        )
        assert (again["steps"], again["loss"]) == (alone["steps"], alone["loss"])
        assert ("\nresult " in capsys.readouterr().out) == (verbose is not False), "in a notebook, unless refused"


class Failing(Reporter):
    """A reporter of the user that fails."""

    def started(self, header: RunHeader) -> None:
        raise ZeroDivisionError


def test_failure_leaves_no_group_or_variables_to_the_next_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook can train again after a run that failed."""
    recipe = recipe_of(data, "dp1")
    with monkeypatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "no-such")
        before = dict(os.environ)
        with pytest.raises(RuntimeError, match="no-such"):
            vitpar.train(recipe, device="cpu", run_dir=tmp_path / "run")
        assert dict(os.environ) == before, "joining fails after it has set variables"
    before = dict(os.environ)
    with pytest.raises(ZeroDivisionError):
        vitpar.train(recipe, device="cpu", run_dir=tmp_path / "run", reporter=Failing())
    assert not dist.is_initialized() and dict(os.environ) == before


def test_settings_override_a_recipe_and_are_checked(data: Path, tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="needs 4 ranks but the world has 1"):
        vitpar.train("digits", {"data.path": str(data), "parallel.mesh": "dp4"}, device="cpu", run_dir=tmp_path / "run")
    with pytest.raises(RecipeError, match=r"unknown recipe key 'train\.epoch'"):
        vitpar.train("digits", {"data.path": str(data), "train.epoch": 4}, device="cpu", run_dir=tmp_path / "run")
    with pytest.raises(TypeError, match="settings need the path of a recipe"):
        vitpar.train(recipe_of(data, "dp1"), {"train.steps": 1}, run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
