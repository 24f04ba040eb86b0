"""Spawned ranks use the plan that their launcher chose, even if the files it read have changed since."""

from pathlib import Path
from typing import Any

import pytest
import typer

from vitpar import launch
from vitpar.launch.world import HANDED, REPORTS
from vitpar.strategy import parse
from vitpar.strategy.plan_json import plan_text
from vitpar.training.recipe import read_recipe
from vitpar.training.recipe.recipe import Chosen
from vitpar_cli import recipe_options, world

CHOSEN = Chosen(parse("pp2: embed=fsdp2, *=dp2+zero1"), "since the first does not fit")


def handed(monkeypatch: pytest.MonkeyPatch, folder: Path, chosen: Chosen | None) -> None:
    """Start ranks with `chosen` through a fake spawn that only writes the launcher's message to `folder`.

    The environment then makes this process look like one of those ranks.
    """

    def spawn(ranks: int, argv: list[str], *, handed: str | None, **_: Any) -> int:
        assert argv[:3] == ["-P", "-m", "vitpar_cli.main"], "files of the working folder could replace modules"
        if handed is not None:
            (folder / HANDED).write_text(handed)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(launch, "spawn", spawn)
        patch.setattr(launch, "find_world", lambda: None)
        with pytest.raises(typer.Exit):
            world.enter(4, "cpu", chosen=chosen)
    monkeypatch.setenv(REPORTS, str(folder))


def test_rank_uses_the_plan_of_its_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.json"
    mesh.write_text(plan_text(parse("dp4")))  # the file changed after the launch
    recipe = read_recipe(None, {"data.path": "unused", "train.steps": 1, "parallel.mesh": str(mesh)})
    assert str(recipe_options.decide(recipe, recipe.config(10), "cpu")[1].plan) == "dp4"
    handed(monkeypatch, tmp_path, None)
    assert world.handed_plan() is None
    handed(monkeypatch, tmp_path, CHOSEN)
    assert recipe_options.decide(recipe, recipe.config(10), "cpu")[1] == CHOSEN


def test_ranks_read_the_handed_text_from_their_folder(tmp_path: Path) -> None:
    program = f"import os, pathlib; text = pathlib.Path(os.environ['{REPORTS}'], '{HANDED}').read_text()"
    write = f"pathlib.Path('{tmp_path}', os.environ['RANK']).write_text(text)"
    assert launch.spawn(2, ["-c", f"{program}; {write}"], device="cpu", handed="a plan") == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["a plan"] * 2
