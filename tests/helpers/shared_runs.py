"""Runs that several test files use, trained once in a session for all processes that run tests."""

import fcntl
import os
from pathlib import Path

import pytest

from helpers import killed_runs
from helpers.command_line import run
from helpers.small_data import pack_small

SMALL = """
[model]
name = "vit_custom"
image_size = 8
patch_size = 4
embed_dim = 24
depth = 4
num_heads = 2
drop_path = 0.1
init = "moco"

[data]
path = "data"
workers = 1
crop_pct = 0.7
interpolation = "bilinear"
mean = [0.3, 0.4, 0.5]
std = [0.2, 0.3, 0.4]

[optimizer]
lr = 0.01

[train]
steps = 4
batch_size = 8
log_every = 1
eval_every = 3
ema_decay = 0.5
"""
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
