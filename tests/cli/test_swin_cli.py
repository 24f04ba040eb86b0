"""A Swin Transformer on the command line: train, resume under another plan, evaluate."""

import json
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.run_folder import losses_of, rows_of
from helpers.small_data import VAL

RECIPE = """
[model]
name = "swin_custom"
drop_path = 0.1
patch_size = 1
image_size = 8
window_size = 2
embed_dim = 8
depths = [2, 2, 2]
num_heads = [2, 4, 4]

[data]
path = "data"
workers = 0

[train]
steps = 4
batch_size = 8
log_every = 1
eval_every = 4
ema_decay = 0.9

[checkpoint]
every = 2
keep = 0
"""


@pytest.mark.slow
def test_run_resumes_under_another_plan_and_is_evaluated(place: Path, vitpar: Command) -> None:
    words = ("train", "--recipe", "recipe.toml", "--mesh")
    for mesh, run in (("dp1", "alone"), ("pp2xdp2", "meshed")):
        done = vitpar(*words, mesh, "--run-dir", run)
        assert done.returncode == 0, done.stderr
    assert losses_of(place / "meshed") == pytest.approx(losses_of(place / "alone"), rel=1e-4)
    done = vitpar("train", "--resume", "meshed/checkpoints/step_2", "--mesh", "fsdp2xtp2", "--run-dir", "resumed")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(place / "resumed", "train")] == [3, 4]
    assert losses_of(place / "resumed") == pytest.approx(losses_of(place / "alone")[2:], rel=1e-4)
    evaluated = vitpar("eval", "--checkpoint", "resumed/weights", "--data", "data", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    found = json.loads(evaluated.stdout)
    assert found["samples"] == VAL
    assert found["loss"] == pytest.approx(rows_of(place / "resumed", "eval")[-1]["loss"], rel=1e-4)
