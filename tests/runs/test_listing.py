"""Summaries of the runs in a folder."""

import os
import time
from pathlib import Path

import pytest

from helpers.run_folders import eval_row, event, start, train_row, write_run
from vitpar.errors import DataError
from vitpar.runs.folder import runs_in, summary


def test_summaries_have_the_newest_numbers(tmp_path: Path) -> None:
    rows = [train_row(1, images_per_second=1.0)]
    rows += [train_row(step, images_per_second=100.0 * (1 + step % 2)) for step in range(2, 502)]
    rows += [eval_row(500, loss=0.5, top1=0.25), '{"kind": "train", "st']
    write_run(tmp_path / "mine", rows, events=[start("tp2", 900), event("warning", text="the learning rate is large")])
    found = summary(*runs_in(tmp_path))
    assert found.pop("metric")["name"] == "top1" and found.pop("age_seconds") < 60
    assert found.pop("images_per_second") == pytest.approx(400 / 3, rel=0.01), "of the newest rows, harmonic"
    about = {"name": "mine", "state": "failed", "plan": "tp2", "note": "it ended without a message: was it killed?"}
    assert found == about | {
        "model": "vit_custom",
        "data": "data_shards/digits",
        "steps": 501,
        "total_steps": 900,
        "loss": 0.5,
        "value": 0.25,
    }


def test_only_runs_are_listed_the_newest_first(tmp_path: Path) -> None:
    for name, age in (("old", 3), ("new", 1), ("bad", 4), ("middle", 2)):
        run = write_run(tmp_path / name, [train_row(1, loss=2.0), train_row(2, loss=None)])
        if name == "bad":  # its metrics cannot be read
            (run / "metrics.jsonl").write_text("version https://git-lfs.github.com/spec/v1\n")
        os.utime(run / "log.txt", (time.time() - age * 3600,) * 2)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.txt").write_text("")
    empty, new, *others = runs_in(tmp_path)
    assert [run.name for run in (empty, new, *others)] == ["empty", "new", "middle", "old", "bad"]
    assert (empty.plan_words, empty.metrics.steps, empty.loss) == ("?", 0, None)
    assert 3500 < new.age_seconds < 3700 and new.state == "complete"
    assert (new.loss, new.last("top1")) == (2.0, None), "without an evaluation the loss is that of training"
    assert others[-1].state == "failed"
    assert others[-1].note.startswith("cannot read") and "git-lfs" in others[-1].note
    assert [run.name for run in runs_in(tmp_path / "old")] == ["old"]
    with pytest.raises(DataError, match=r"there is no folder '.*gone': name one"):
        runs_in(tmp_path / "gone")
