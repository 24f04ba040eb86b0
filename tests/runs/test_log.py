"""Events of a log; tests/training/saving/test_frozen_runs.py reads that of a real run."""

from pathlib import Path

from helpers.run_folders import start_line
from vitpar.runs.log import read_log
from vitpar.text import log_line


def log_of(path: Path, *lines: str) -> Path:
    path.write_text("".join(map(log_line, lines)))
    return path


def test_a_complete_run_ends_with_done(tmp_path: Path) -> None:
    lines = (start_line("pp2: *=tp2, head=dp2", 1200), "saving step 1,200: x", "done  x")
    found = read_log(log_of(tmp_path / "log", *lines))
    (start,) = found.starts
    assert (start.plan, start.steps, start.batch_size, start.after) == ("pp2: *=tp2, head=dp2", 1200, 128, 0)
    assert (start.model, start.parameters, start.device) == ("vit_custom", 203_530, "cpu")
    assert found.saves == [1200] and found.end == "done"


def test_a_resumed_run_forgets_the_steps_that_it_repeats(tmp_path: Path) -> None:
    lines = [start_line("dp2", 60), "saving step 20: x", "saving step 40: x", "error: the training diverged at step 41"]
    failed = read_log(log_of(tmp_path / "failed", *lines))
    assert (failed.end, failed.words, failed.saves) == ("error", "the training diverged at step 41", [20, 40])
    said = "changed settings: parallel.mesh was dp2 and is tp2"
    again = ["warning: old", said, "resuming from runs/a/checkpoints/step_20: 20 steps done", start_line("tp2", 60)]
    found = read_log(log_of(tmp_path / "resumed", *lines, *again, "warning: slow", "saving step 60: x"))
    assert found.saves == [20, 60] and found.end == "" and found.warnings == ["slow"]
    assert [(start.plan, start.after) for start in found.starts] == [("dp2", 0), ("tp2", 20)]
    assert [start.changed for start in found.starts] == ["", "parallel.mesh was dp2 and is tp2"]
