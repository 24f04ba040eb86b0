"""Charts: their data, lines that coincide, marks; thinning keeps spikes and breaks lines at gaps."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.run_folders import event, start, train_row, write_run
from vitpar.runs.charts import (
    MOST_MARKS,
    Chart,
    Line,
    charts,
    data_of,
    drawn_rows,
    figure,
    marks_of,
    numbers,
    shared_steps,
    smoothed,
)
from vitpar.runs.folder import RunRecord
from vitpar.runs.metrics import Column
from vitpar.runs.pages.plotly import Charts


def line(run: int, y: list[float], *, evaluated: bool = False, first: int = 1) -> Line:
    steps = np.arange(first, first + len(y), dtype=np.float64)
    x = {"step": steps, "samples": 128 * steps, "hours": steps / 3600}
    return Line(run, f"run {run + 1}", x, np.array(y, dtype=np.float64), evaluated)


def drawn(*lines: Line, columns: int = 400, **more: Any) -> dict[str, Any]:
    return data_of(Chart("Loss", lines, **more), columns)


def html_of(chart: Chart) -> str:
    return Charts().add(figure(chart, 400))


def test_lines_have_their_values_on_every_axis() -> None:
    found = drawn(line(0, [3.0, np.inf, 1.0, 2.0]), unit=" %", scale=100.0)["lines"][0]
    assert found["y"] == [300, None, 100, 200] and found["x"]["step"] == [1, None, 3, 4]
    assert found["x"]["samples"] == [128, None, 384, 512] and found["smooth"]["strong"] == [300, None, 100, 200]
    smooth = drawn(line(0, list(range(100))))["lines"][0]["smooth"]
    assert smooth["light"][1] == 1 and smooth["strong"][0] == 3
    for other in (drawn(line(0, [1.0] * 9, evaluated=True)), drawn(line(0, [1.0] * 9), smooth=False)):
        assert other["lines"][0]["smooth"] == {}
    assert numbers(np.array([1 / 3, np.nan, -np.inf, 2.0**53, 1e-30])) == [0.333333, None, None, 2**53, 1e-30]


def test_long_lines_of_a_chart_keep_the_same_steps() -> None:
    draw = np.random.default_rng(0)
    rows = [draw.normal(size=5000), draw.normal(size=5000)]
    rows[0][1234], rows[1][4321] = 40.0, -40.0
    places = dict.fromkeys(("step", "samples", "hours"), np.array([777.0, 3333.0]))
    evaluated = Line(0, "validation", places, rows[0][:2], True)
    *lines, points = drawn(line(0, list(rows[0])), line(1, list(rows[1])), evaluated, columns=100)["lines"]
    kept = lines[0]["x"]["step"]
    assert kept == lines[1]["x"]["step"] and 300 < len(kept) <= 4 * 100 + 4
    assert {1, 1235, 4322, 5000, 777, 3333} <= set(kept), "spikes, ends, and steps of evaluations"
    assert points["x"]["step"] == [777, 3333]
    assert lines[0]["y"][kept.index(1235)] == 40 and lines[1]["y"][kept.index(4322)] == -40


def test_lines_that_coincide_have_different_widths() -> None:
    y = [3.0, 2.0, 1.0]

    def widths(*lines: Line) -> list[int]:
        return [one["wider"] for one in drawn(*lines)["lines"]]

    near = line(0, y), line(1, [v + 0.001 for v in y])
    assert widths(*near) == [1, 0] and widths(*near, line(2, y)) == [2, 1, 0]
    assert "The lines of the runs coincide: they differ by at most 0.001." in html_of(Chart("Loss", near))
    assert "at most 0.1 %." in html_of(Chart("Loss", near, unit=" %", scale=100.0))
    assert "The lines of the runs are equal." in html_of(Chart("Loss", [line(0, y), line(1, y)]))
    others = {"apart": line(1, [3.0, 2.5, 1.0]), "shorter": line(1, y[:2]), "gap": line(1, [3.0, np.nan, 1.0])}
    for name, other in {**others, "other steps": line(1, y, first=9)}.items():
        assert widths(line(0, y), other) == [0, 0], name
        assert "coincide" not in html_of(Chart("Loss", [line(0, y), other]))


def test_marks_that_cannot_be_distinguished_are_left_out(tmp_path: Path) -> None:
    saves = [event("save", step) for step in range(1, 1001)]
    events = [start("dp2", 1000), *saves[:500], start("tp2", 1000, 500), *saves[500:]]
    found = marks_of(RunRecord(write_run(tmp_path / "one", map(train_row, range(1, 1001)), events=events)), 3)
    saved, restarts = ([mark for mark in found if mark["kind"] == kind] for kind in ("checkpoint", "restart"))
    assert MOST_MARKS * 0.9 <= len(saved) <= MOST_MARKS and all(mark["run"] == 3 for mark in found)
    assert [mark["words"] for mark in restarts] == ["resumed after 500 steps under tp2 instead of dp2"]
    assert restarts[0]["x"] == {"step": 500, "samples": 64_000, "hours": pytest.approx(50 / 3600, rel=1e-5)}
    unknown = write_run(tmp_path / "two", [train_row(1, samples=None)], events=[event("save", 1)])
    assert marks_of(RunRecord(unknown), 0)[0]["x"]["samples"] is None


def test_charts_are_those_of_recorded_metrics(tmp_path: Path) -> None:
    more = {"weight_decay": 0.1, "drop_path": 0.2, "top1": 0.5}
    rows = [train_row(step, image_size=96 + 32 * (step > 5), **more) for step in range(1, 9)]
    page, html = charts([RunRecord(write_run(tmp_path / "one", rows))])
    found = {chart["place"]: chart for chart in page.data["charts"]}
    assert {"chart-Weight decay-0", "chart-Drop-path-0", "chart-Image size-0"} <= set(found)
    assert found["chart-Image size-0"]["whole"] and found["chart-Image size-0"]["lines"][0]["y"][-1] == 128
    (training,) = found["chart-Top-1-0"]["lines"]
    assert training["name"] == "training" and training["y"][0] == 50 and len(html) == len(found) == 10


def thinned(x: Column, y: Column, columns: int = 400) -> tuple[list[float], list[int]]:
    """Return the values of a line that are drawn, and the places of those before which it is interrupted."""
    rows, breaks = drawn_rows(x, y, shared_steps([(x, y)], columns), columns)
    return y[rows].tolist(), breaks.tolist()


def test_every_spike_stays() -> None:
    draw = np.random.default_rng(0)
    x, y = np.arange(100_000.0), draw.normal(size=100_000)
    spikes = {12_345: 1e6, 12_346: -1e6, 99_999: 50.0, 0: -77.0}
    for index, value in spikes.items():
        y[index] = value
    kept = shared_steps([(x, y)], 400)
    assert len(kept) <= 802 and set(spikes) <= set(kept.tolist())
    edges = np.linspace(0, x[-1], 401)
    edges[-1] += 1  # the last part includes its end
    for low, high in itertools.pairwise(edges):
        inside, those = y[(x >= low) & (x < high)], y[kept.astype(int)][(kept >= low) & (kept < high)]
        assert (those.min(), those.max()) == (inside.min(), inside.max())
    assert thinned(x, y)[1] == []


def test_missing_values_and_gaps_interrupt_a_line() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        y = np.arange(6.0)
        y[3] = bad
        assert thinned(np.arange(6.0), y) == ([0, 1, 2, 4, 5], [3])
    x = np.array([1, 2, 3, 4, 60, 61, 62.0])
    assert thinned(x, x)[1] == [4] and thinned(50 * x[:4], x[:4])[1] == []
    long = np.concatenate([np.arange(40_000.0), np.arange(60_000.0, 100_000.0)])
    values, breaks = thinned(long, long)
    assert len(breaks) == 1 and values[breaks[0] - 1 : breaks[0] + 1] == [39_999, 60_000]
    x = np.arange(100_000.0)
    values, breaks = thinned(x, np.where((x < 30_000) | (x > 50_000), x % 7, np.nan))
    assert len(breaks) == 1, "a long piece without values is a gap"
    values, breaks = thinned(x, np.where(x % 2 == 0, x, np.nan))
    assert len(values) <= 802 and breaks == [], "many missing values do not make many pieces"


def test_smoothing_is_the_mean_of_a_centred_window() -> None:
    y = np.array([1.0, 5.0, 3.0, np.nan, 8.0, 2.0])
    found = smoothed(y, 0.5)  # a window of 3 rows
    np.testing.assert_allclose(found, [3.0, 3.0, 4.0, np.nan, 5.0, 5.0])
    np.testing.assert_array_equal(smoothed(y, 0.01), y)
