"""Metrics of a run, read back; its events; summaries of the runs in a folder."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.run_folders import eval_row, event, start, train_row, write_run
from vitpar.errors import DataError
from vitpar.runs.folder import runs_in, summary
from vitpar.runs.metrics import events_of, read_metrics


def written(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_columns_have_a_value_for_every_row(tmp_path: Path) -> None:
    rows = [train_row(1, loss=2.5), train_row(2, loss=None), train_row(4, loss=2.0, loss_scale=1024.0)]
    found = read_metrics(written(tmp_path / "m", *rows, eval_row(4)))
    assert found.steps == 4 and found.damaged == 0
    np.testing.assert_array_equal(found.train["step"], [1, 2, 4])
    np.testing.assert_array_equal(found.train["loss"], [2.5, np.nan, 2.0])
    np.testing.assert_array_equal(found.train["loss_scale"], [np.nan, np.nan, 1024.0])
    np.testing.assert_array_equal(found.eval["samples"], [512]), "those of training, not the evaluated ones"


def test_numbers_of_groups_of_layers_are_columns(tmp_path: Path) -> None:
    first = train_row(1, grad_norms={"embed": 0.5, "head": None}, memory_by_rank=[5, 6])
    last = train_row(3, grad_norms={"embed": 0.25}, update_ratios={"<b>": 1e-3}, memory_by_rank=[7, "8"])
    found = read_metrics(written(tmp_path / "m", first, train_row(2), last))
    np.testing.assert_array_equal(found.train["grad_norms/embed"], [0.5, np.nan, 0.25])
    np.testing.assert_array_equal(found.train["update_ratios/<b>"], [np.nan, np.nan, 1e-3])
    np.testing.assert_array_equal(found.memory, [7, np.nan])
    assert {name for name in found.train if "/" in name} == {"grad_norms/embed", "grad_norms/head", "update_ratios/<b>"}


def test_numbers_that_are_not_finite_are_kept_as_such(tmp_path: Path) -> None:
    path = tmp_path / "m"
    texts = [json.dumps(train_row(1, loss=value)) for value in (np.nan, np.inf, -np.inf)]
    lines = [text.replace('"step": 1,', f'"step": {step},') for step, text in enumerate(texts, start=1)]
    huge = json.dumps(train_row(4)).replace(json.dumps(train_row(4)["loss"]), "1" + "0" * 400)
    words = json.dumps(train_row(5, loss="2.3"))
    np.testing.assert_array_equal(
        read_metrics(written(path, *lines, huge, words)).train["loss"], [np.nan, np.inf, -np.inf, np.inf, np.nan]
    )


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    damaged = [
        *('{"kind": "train", "step": 3, "lo', "[1, 2]", "nonsense", '"text"', '{"kind": "train"}'),
        *('{"kind": "train", "step": "3"}', '{"kind": "train", "step": -1}', '{"kind": "train", "step": NaN}'),
        *("[" * 100_000, "x" * 200_000),
    ]
    for bad in damaged:
        found = read_metrics(written(tmp_path / "m", train_row(1), bad, train_row(2)))
        assert found.damaged == 1, bad[:30]
        np.testing.assert_array_equal(found.train["step"], [1, 2])


def test_of_repeated_steps_the_last_row_counts(tmp_path: Path) -> None:
    rows = [train_row(1), train_row(2, loss=9.0), train_row(3), train_row(2, loss=1.0)]
    found = read_metrics(written(tmp_path / "m", *rows))
    np.testing.assert_array_equal(found.train["step"], [1, 2, 3])
    assert found.train["loss"][1] == 1.0


def test_hours_add_up_the_steps(tmp_path: Path) -> None:
    rows = [train_row(1, step_ms=1.8e6), train_row(2, step_ms=None), train_row(3, step_ms=1.8e6)]
    found = read_metrics(written(tmp_path / "m", *rows, eval_row(3)))
    np.testing.assert_allclose(found.train["hours"], [0.5, 0.5, 1.0])
    np.testing.assert_allclose(found.eval["hours"], [1.0])
    without = read_metrics(written(tmp_path / "n", *(train_row(step, step_ms=None) for step in (1, 2)), eval_row(2)))
    assert np.isnan(without.train["hours"]).all() and np.isnan(without.eval["hours"]).all()


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


def test_a_resumed_run_has_the_end_and_warnings_of_its_last_part() -> None:
    rows = [start("dp2", 60), event("save", 20), event("warning", text="old"), event("error", text="diverged")]
    failed = events_of(rows)
    assert (failed.end, failed.words, failed.saves, failed.warning) == ("error", "diverged", [20], "old")
    again = [start("tp2", 60, 20, "parallel.mesh was dp2 and is tp2"), event("warning", text="slow"), event("save", 60)]
    found = events_of([*rows, *again, event("stopped", text="stopped by SIGTERM")])
    assert (found.end, found.words, found.saves) == ("stopped", "stopped by SIGTERM", [20, 60])
    assert found.warning == "slow"
    assert [(one.plan, one.step, one.changed) for one in found.starts] == [
        ("dp2", 0, ""),
        ("tp2", 20, "parallel.mesh was dp2 and is tp2"),
    ]


def test_rows_of_strangers_are_left_out() -> None:
    odd = [{"event": "start", "plan": 3}, {"event": ["done"]}, {"event": "save", "step": "x"}, {"event": "other"}]
    odd.append(start("dp2", 60) | {"parameters": 10**400})
    found = events_of(odd)
    assert (found.starts, found.saves, found.end) == ([], [], "")
