"""`vitpar train --track` as a user runs it: output, ranks, and resuming."""

import json
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.run_folder import losses_of, rows_of
from helpers.shared_runs import SMALL
from helpers.tracker_files import EventFiles, wandb_history

RECIPE = SMALL + "[checkpoint]\nevery_steps = 2\n"


@pytest.mark.slow
def test_tracked_run_prints_the_same_and_resumes_in_its_trackers(place: Path, vitpar: Command) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    words = ("--mesh", "dp2", "--track", "tensorboard", "--track", "wandb", "--set", "track.project=ours")
    done = vitpar("train", "--recipe", "recipe.toml", "--run-dir", "run", *words, "--json")
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["steps"] == 4
    run = place / "run"
    assert not (place / "wandb").exists()
    assert 'trackers = [\n    "tensorboard",\n    "wandb",\n]' in (run / "recipe.toml").read_text()
    before = losses_of(run)
    done = vitpar("train", "--resume", "run/checkpoints/step_2", "--mesh", "dp1")
    assert done.returncode == 0, done.stderr
    assert "track      tensorboard, wandb (offline)" in done.stdout and "warning" not in done.stdout
    events = EventFiles(run)
    assert len(events.files) == 2
    assert [step for step, _ in events.scalars("train/loss")] == [1, 2, 3, 4]
    assert [value for _, value in events.scalars("train/loss")] == pytest.approx(losses_of(run), rel=1e-6)
    assert losses_of(run) == pytest.approx(before, rel=1e-5)
    assert [step for step, _ in wandb_history(run)] == [1, 2, 3, 4]
    assert events.scalars("val/ece")[-1] == (4, pytest.approx(rows_of(run, "eval")[-1]["ece"], rel=1e-6))
