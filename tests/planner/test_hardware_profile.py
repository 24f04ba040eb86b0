"""Hardware profiles: timing curves, their files, and the measurements."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from helpers.ranks import RankPool
from vitpar.planner.measure.hardware import MeasureEffort, profile_hardware
from vitpar.planner.measure.sending import groups_of, most_nodes
from vitpar.planner.profile.cluster import group_shapes
from vitpar.planner.profile.curves import Curve, Timing, fit
from vitpar.planner.profile.profiles import OPERATIONS, Hardware
from vitpar_cli.profile import hardware

LITTLE = MeasureEffort(0.002, ("float32",), (16, 32), (2**10, 2**14), (2**12,))


def curve(*points: tuple[int, float]) -> Curve:
    return Curve(timings=tuple(Timing(size=size, seconds=s, spread=0, samples=3) for size, s in points))


def test_curve_interpolates_and_extrapolates_at_the_last_rate() -> None:
    line = curve((100, 1.0), (200, 3.0), (300, 4.0))
    assert [line.seconds(size) for size in (1, 100, 150, 300, 500)] == [1.0, 1.0, 2.0, 4.0, 6.0]
    assert curve((100, 2.0)).seconds(300) == 6.0


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-7, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]),
    st.tuples(st.floats(0, 1e10), st.floats(0, 1e10)),
)
def test_larger_sizes_never_take_less_time(points: list[tuple[int, float]], sizes: tuple[float, float]) -> None:
    """Noisy timings must not make more work look cheaper to the search."""
    line = curve(*sorted(points))
    less, more = sorted(sizes)
    assert line.seconds(less) <= line.seconds(more) * (1 + 1e-12)


@given(st.floats(0, 1), st.floats(1e-12, 1e-6))
def test_fit_recovers_latency_and_slope(latency: float, slope: float) -> None:
    sizes = [2**n for n in range(10, 28, 3)]
    found = fit(sizes, [latency + slope * size for size in sizes])
    for size in (sizes[0], sizes[-1]):
        assert found[0] + found[1] * size == pytest.approx(latency + slope * size, rel=1e-6)


def test_fitted_latency_and_slope_are_never_negative() -> None:
    assert fit([100, 200], [1.0, 3.0])[0] == 0
    assert fit([100, 200], [3.0, 1.0])[1] == 0
    assert fit([100], [2.0]) == (0, 0.02)


@pytest.mark.parametrize(
    ("world", "per_node", "pairs"),
    [(8, 4, {1: 1, 2: 1, 4: 2}), (12, 4, {1: 1, 2: 1, 3: 2, 6: 2}), (6, 3, {1: 2, 3: 2})],
)
def test_groups_partition_the_world_within_nodes_and_across(world: int, per_node: int, pairs: dict[int, int]) -> None:
    """All pairs of a stride send at once: a link is across nodes if one of them is."""
    shapes = list(group_shapes(world))
    assert len(set(shapes)) == len(shapes)
    for ranks, stride in shapes:
        groups = groups_of(world, ranks, stride)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert all(len(group) == ranks and group[1] - group[0] == stride for group in groups)
    assert {stride: most_nodes(world, 2, stride, per_node) for ranks, stride in shapes if ranks == 2} == pairs


def measure(device: torch.device) -> tuple[Hardware, list[tuple[int, int, str]]]:
    said: list[tuple[int, int, str]] = []
    return profile_hardware("tiny", device, 2, LITTLE, lambda *point: said.append(point)), said


@pytest.mark.parametrize(
    ("size", "expected"), [(2, [(2, 1)]), pytest.param(4, [(2, 1), (2, 2), (4, 1)], marks=pytest.mark.slow)]
)
def test_every_group_and_operation_is_measured(
    size: int, expected: list[tuple[int, int]], ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    results = ranks(size).run(measure)
    profile, said = results[0]
    assert all(other == profile for other, _ in results)
    assert [done for done, _, _ in said] == list(range(said[0][1]))
    found = [(link.ranks, link.stride, link.operation) for link in profile.links]
    assert found == [(n, s, name) for n, s in expected for name in OPERATIONS if name != "p2p" or n == 2]
    assert [(link.stride, link.nodes) for link in profile.links if link.operation == "p2p"] == [
        (stride, stride) for ranks, stride in expected if ranks == 2
    ]
    assert profile.overlap is not None and profile.pipeline > 0
    profile.save(tmp_path / "hardware.json")
    assert Hardware.read(tmp_path / "hardware.json") == profile


def test_single_rank_has_no_links(alone: None) -> None:
    profile, _ = measure(torch.device("cpu"))
    assert profile.links == () and profile.overlap is None and profile.matmuls[0].timings


def test_profile_command_writes_and_prints_the_profile(
    environment: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(MeasureEffort, "usual", lambda device, seconds: LITTLE)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(hardware)
    path = tmp_path / "one.json"
    shown = CliRunner().invoke(app, ["--ranks", "1", "--device", "cpu", "--out", str(path)]).stdout
    profile = Hardware.read(path)
    assert profile.name == "1xcpu" and f"written    {path}" in shown and "float32" in shown
    wrong = CliRunner().invoke(app, ["--ranks", "1", "--device", "cpu", "--out", str(tmp_path / "no" / "one.json")])
    assert "give a file in a writable folder" in str(wrong.exception)
