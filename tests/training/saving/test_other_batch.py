"""A run resumed with another batch size sees as many images as promised, with the learning rates of those images."""

from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.trained import recipe_text
from vitpar.runs.metrics import rows

RECIPE = recipe_text(
    **{"model.depth": 2, "data.path": "data", "train.batch_size": 8, "train.steps": 8, "train.log_every": 1},
    **{"lr_schedule.warmup": 2, "checkpoint.every": 4, "checkpoint.keep": 5},
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
    rates = {row["samples"] - 8: row["lr"] for row in promised}  # by the images before the step
    equal = [
        row["lr"] == pytest.approx(rates[row["samples"] - batch]) for row in found if row["samples"] - batch in rates
    ]
    assert equal and all(equal)
