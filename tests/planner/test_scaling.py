"""Simulated weak and strong scaling with the number of devices."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from helpers.html_pages import Page, charts_of
from vitpar.errors import PlannerError
from vitpar.models import model_config
from vitpar.planner.cost.layer import LayerCosts
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model, tensors
from vitpar.planner.report.data import plan_of
from vitpar.planner.report.tables import Regime, best_row, images, with_efficiency
from vitpar.planner.report.uncertainty import BANDS
from vitpar.planner.search.best import Search
from vitpar.planner.search.space import Space
from vitpar_cli.scaling import scaling as command

CONFIG = model_config("vit_small_patch16_224")


def costs(ranks: int) -> LayerCosts:
    hardware = find_cluster("2x4xA100").hardware(ranks)
    return LayerCosts(CONFIG, hardware, estimate_model(CONFIG, "bf16", hardware, tensors(CONFIG, ranks)))


def points(regime: Regime, numbers: tuple[int, ...] = (1, 2, 8), memory: float = 40e9) -> list[dict[str, Any]]:
    places = [{"ranks": ranks, "batch_size": images(regime, 512, ranks, 8)} for ranks in numbers]
    spaces = [Space(CONFIG, place["ranks"], (place["batch_size"],), "bf16") for place in places]
    searches = [Search(space, costs(space.ranks)) for space in spaces]
    return with_efficiency([best_row(place, one, memory) for place, one in zip(places, searches, strict=True)])


def test_speed_grows_under_weak_and_strong_scaling() -> None:
    weak, strong = points("weak"), points("strong")
    assert [point["batch_size"] for point in weak] == [64, 128, 512]
    assert [point["batch_size"] for point in strong] == [512] * 3
    for found in (weak, strong):
        speeds = [point["images_per_second"] for point in found]
        assert len(speeds) == 3 and speeds == sorted(speeds)
        assert all(plan_of(point).world_size == point["ranks"] for point in found)
    assert all(0 <= point["at_most_better_by"] < 0.05 for point in weak)
    assert strong[0]["efficiency"] == 1.0 and strong[-1]["efficiency"] < 1.0
    assert weak[-1]["step_seconds"] == strong[-1]["step_seconds"]


def test_device_counts_without_a_fitting_plan_have_no_point() -> None:
    found = points("strong", (1, 8), memory=0.25e9)
    assert "plan" not in found[0] and "plan" in found[-1]
    assert [point["efficiency"] for point in found] == [None, 1.0]


def test_scaling_command_prints_tables_and_writes_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    base = ("--cluster", "4xA100", "--model", "vit_small_patch16_224", "--batch-size", "64", "--precision", "bf16")
    report = tmp_path / "scaling.html"
    shown = CliRunner().invoke(app, [*base, "--ranks", "1,4", "--report", str(report)])
    assert "weak scaling" in shown.stdout and "100.0%" in shown.stdout and "estimates" in shown.stdout
    page = report.read_text()
    bands = BANDS[True, False], BANDS[True, True]
    for band in bands:
        assert all(f"{band}: error of {band.runs} {band.description[:9]}" in words for words in (shown.stdout, page))
    assert Page(page).outside == [] and "Strong scaling" in page
    weak, strong = charts_of(page)["Samples/s by number of devices"]["traces"]
    assert weak["x"] == ["1", "4"] and weak["y"][1] > 3 * weak["y"][0] and strong["y"][1] == weak["y"][1]
    for one in (weak, strong):
        assert one["error_y"]["array"] == [y * band.share for y, band in zip(one["y"], bands, strict=True)]
    found = json.loads(CliRunner().invoke(app, [*base, "--json"]).stdout)
    assert [point["ranks"] for point in found["strong"]] == [1, 2, 4]
    assert all(point["at_most_better_by"] >= 0 for point in found["weak"])
    with pytest.raises(PlannerError, match="a batch of 66 on 4 ranks does not scale to a whole number of samples on 1"):
        CliRunner().invoke(app, [*base[:4], "--batch-size", "66", *base[6:]], catch_exceptions=False)
    with pytest.raises(PlannerError, match="--ranks 8 is more than the 4"):
        CliRunner().invoke(app, [*base, "--ranks", "8"], catch_exceptions=False)
