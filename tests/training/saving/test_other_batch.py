"""A run resumed with another batch size sees as many images as promised, and has their learning rates and decays."""

from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.trained import recipe_text
from vitpar.runs.metrics import rows

RECIPE = recipe_text(
    **{"model.depth": 2, "data.path": "data", "train.batch_size": 8, "train.steps": 8, "train.log_every": 1},
    **{"lr_schedule.warmup": 2, "checkpoint.every": 4, "checkpoint.keep": 5},
    **{"optimizer.weight_decay": 0.04, "optimizer.weight_decay_end": 0.4},
)


@pytest.mark.parametrize("batch", [4, 16])
def test_length_in_steps_counts_images(batch: int, place: Path, vitpar: Command) -> None:
    if not (place / "run").exists():
        assert vitpar("train", "--recipe", "recipe.toml", "--run-dir", "run").returncode == 0
    words = ("--resume", "run/checkpoints/step_4", "--batch-size", str(batch), "--allow-change", "train.batch_size")
    done = vitpar("train", *words, "--run-dir", f"batch{batch}")
    assert done.returncode == 0, done.stderr
    promised, found = (
        [row for row in rows(place / name / "metrics.jsonl") if row and row["kind"] == "train"]
        for name in ("run", f"batch{batch}")
    )
    assert [row["samples"] for row in found] == list(range(4 * 8 + batch, 8 * 8 + 1, batch))
    for name in ("lr", "weight_decay"):
        values = {row["samples"] - 8: row[name] for row in promised}  # by the images before the step
        shared = [row for row in found if row["samples"] - batch in values]
        assert shared and [row[name] for row in shared] == pytest.approx([values[r["samples"] - batch] for r in shared])
