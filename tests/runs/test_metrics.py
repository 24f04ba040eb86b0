"""Metrics of a run, read back: gaps, numbers that are not finite, damaged lines, resumed runs."""

import json
from pathlib import Path

import numpy as np

from helpers.run_folders import eval_row, train_row
from vitpar.runs import metrics
from vitpar.runs.metrics import read_metrics


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


def test_a_last_line_without_an_end_is_read_if_it_is_complete(tmp_path: Path) -> None:
    path = written(tmp_path / "m", train_row(1))
    path.write_text(path.read_text() + json.dumps(train_row(2)))
    assert read_metrics(path).steps == 2
    path.write_text(path.read_text()[:-9])
    found = read_metrics(path)
    assert (found.steps, found.damaged) == (1, 1)


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


def test_positions_between_rows_are_interpolated(tmp_path: Path) -> None:
    found = read_metrics(written(tmp_path / "m", train_row(1), train_row(3)))
    np.testing.assert_allclose(found.at("samples", np.array([0.0, 2.0, 3.0])), [0, 256, 384])
    late = read_metrics(written(tmp_path / "n", train_row(101), train_row(103)))
    np.testing.assert_allclose(late.at("samples", np.array([100.0])), [128 * 101]), "nothing is known before"


def test_a_run_without_rows_has_empty_columns(tmp_path: Path) -> None:
    for content in ("", "\n\n", "nonsense\n"):
        (tmp_path / "m").write_text(content)
        found = read_metrics(tmp_path / "m")
        columns = (*found.train.values(), *found.eval.values())
        assert found.steps == 0 and all(len(column) == 0 for column in columns)
        assert set(found.train) == {*metrics.TRAIN, "hours"} and set(found.eval) == {*metrics.EVAL, "samples", "hours"}
