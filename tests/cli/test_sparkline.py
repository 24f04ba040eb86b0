"""Sparkline of a run's loss."""

import math

import pytest

from vitpar_cli.sparkline import ASCII, BLOCKS, COLUMNS, Sparkline


def line_of(steps: int, values: list[float | None], encoding: str = "utf-8") -> str | None:
    line = Sparkline(steps)
    for step, value in enumerate(values, start=1):
        line.add(step, value)
    return line.words(encoding)


@pytest.mark.parametrize(("encoding", "levels"), [("utf-8", BLOCKS), ("ascii", ASCII), ("no such", ASCII)])
def test_levels_follow_the_values(encoding: str, levels: str) -> None:
    assert line_of(8, [7, 6, 5, 4, 3, 2, 1, 0], encoding) == f"{levels[::-1]}  7.0000 to 0.0000"


def test_long_runs_show_means_of_equal_parts() -> None:
    values = [0.0, 2.0] * COLUMNS + [9.0] * 2 * COLUMNS  # 4 steps a column
    assert line_of(4 * COLUMNS, values) == f"{'▁' * 20}{'█' * 20}  0.0000 to 9.0000"


def test_steps_without_a_value_leave_no_column() -> None:
    assert line_of(4, [1.0, None, math.inf, 0.5]) == "█▁  1.0000 to 0.5000"
    resumed = Sparkline(COLUMNS)
    for step in (30, 31, 40, 41):
        resumed.add(step, float(step))
    assert resumed.words() == "▁▂█  30.0000 to 41.0000"


def test_one_value_is_no_line_and_equal_values_are_flat() -> None:
    assert line_of(100, [2.0]) is None and line_of(100, []) is None
    assert line_of(3, [2.0, 2.0, 2.0]) == "▁▁▁  2.0000 to 2.0000"
