"""Runs that several test files use, trained once in a session for all processes that run tests."""

import fcntl
import os
from pathlib import Path

import pytest

from helpers import killed_runs
from helpers.command_line import run
from helpers.small_data import pack_small
from helpers.trained import recipe_text

SMALL = recipe_text(
    **{"model.num_heads": 2, "model.drop_path": 0.1, "optimizer.lr": 0.01, "train.steps": 4, "train.batch_size": 8},
    **{"train.log_every": 1, "train.eval_every": 3, "train.ema_decay": 0.5, "data.path": "data", "data.workers": 1},
    **{
        "data.crop_pct": 0.7,
        "data.interpolation": "bilinear",
        "data.mean": [0.3, 0.4, 0.5],
        "data.std": [0.2, 0.3, 0.4],
    },
)
RECIPES = {"small": SMALL, "uninterrupted": killed_runs.RECIPE}


def shared_run(name: str, factory: pytest.TempPathFactory) -> Path:
    """Return a folder with packed data, the recipe `name`, and `run`, which one process trained with it.

    `printed` is the output of the command. All tests of the session share the folder: copy it before a change.
    """
    base = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / name).exists():
            folder = factory.mktemp(name)
            pack_small(folder).rename(folder / "data")
            (folder / "recipe.toml").write_text(RECIPES[name])
            done = run(folder, ("train", "--recipe", "recipe.toml", "--run-dir", "run"))
            assert done.returncode == 0, done.stderr
            (folder / "printed").write_text(done.stdout)
            folder.rename(base / name)
    return base / name
