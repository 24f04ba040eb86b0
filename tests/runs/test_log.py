"""Events of a log, among them those of a real run that is stopped and resumed under another plan."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.ranks import RankPool
from helpers.run_folders import start_line
from helpers.small_data import pack_small
from helpers.trained import STEPS, recipe_of, train, trainer_of
from vitpar.runs.folder import RunRecord
from vitpar.runs.log import MOST_WARNINGS, read_log
from vitpar.text import log_line
from vitpar.training.recipe import Recipe


def log_of(path: Path, *lines: str) -> Path:
    path.write_text("".join(map(log_line, lines)))
    return path


def test_a_complete_run_ends_with_done(tmp_path: Path) -> None:
    found = read_log(
        log_of(tmp_path / "log", start_line("pp2: *=tp2, head=dp2", 1200), "saving step 1,200: x", "done  x")
    )
    (start,) = found.starts
    assert (start.plan, start.steps, start.batch_size, start.after) == ("pp2: *=tp2, head=dp2", 1200, 128, 0)
    assert (start.model, start.parameters, start.device) == ("vit_custom", 203_530, "cpu")
    assert found.saves == [1200] and found.end == "done"


def test_a_resumed_run_forgets_the_steps_that_it_repeats(tmp_path: Path) -> None:
    lines = [start_line("dp2", 60), "saving step 20: x", "saving step 40: x", "error: the training diverged at step 41"]
    failed = read_log(log_of(tmp_path / "failed", *lines))
    assert (failed.end, failed.words, failed.saves) == ("error", "the training diverged at step 41", [20, 40])
    again = ["warning: old", "resuming from runs/a/checkpoints/step_20: 20 steps done", start_line("tp2", 60)]
    found = read_log(log_of(tmp_path / "resumed", *lines, *again, "warning: slow", "saving step 60: x"))
    assert found.saves == [20, 60] and found.end == "" and found.warnings == ["slow"]
    assert [(start.plan, start.after) for start in found.starts] == [("dp2", 0), ("tp2", 20)]


def test_odd_lines_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe\n2026-01-01 start\n" + b"2026-01-01 10:00:00 " + b"start  , " * 10_000 + b"\n\n")
    assert read_log(path).starts == []
    many = [f"warning: {number}" for number in range(100)]
    assert len(read_log(log_of(path, *many)).warnings) == MOST_WARNINGS


def resume(device: torch.device, recipe: Recipe, run: Path) -> None:
    """Continue the run in its folder; runs on every rank."""
    trainer_of(recipe, run, resume=run, allow_change=("train.steps",)).run()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], RankPool]) -> Path:
    """Return a run of dp1 that was trained for half of its steps, then under tp2 to the end."""
    folder = tmp_path_factory.mktemp("resumed")
    data, run = pack_small(folder), folder / "run"
    ranks(1).run(train, recipe_of(data, "dp1", **{"train.steps": STEPS}), run)
    ranks(2).run(resume, recipe_of(data, "tp2"), run)
    return run


def test_the_log_of_a_real_run_is_understood(resumed: Path) -> None:
    """The patterns are those of the lines that a run writes."""
    run = RunRecord(resumed)
    assert [(start.plan, start.after, start.steps) for start in run.log.starts] == [
        ("dp1", 0, STEPS),
        ("tp2", STEPS, 2 * STEPS),
    ]
    assert run.log.saves == [STEPS, 2 * STEPS] and run.state == "complete" and run.plan_words == "tp2"
    assert (run.log.starts[0].train_images, run.log.starts[0].val_images, run.log.starts[0].batch_size) == (35, 17, 24)
    assert run.metrics.steps == 2 * STEPS and run.last("top1") is not None
