"""`vitpar search` and `vitpar validate`, and the files they write."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers.command_line import printed
from helpers.html_pages import Page, charts_of
from vitpar import __version__
from vitpar.errors import DataError, PlannerError, UserError
from vitpar.planner.profile.cluster import find_cluster
from vitpar.planner.profile.estimate import estimate_model
from vitpar.planner.report.accuracy import accuracy, spearman
from vitpar.recipe import Recipe, read_recipe
from vitpar.runs.pages import plotly
from vitpar.strategy.plan_json import read_plan
from vitpar_cli.models import recipes
from vitpar_cli.profiled import MachineOptions
from vitpar_cli.scaling import scaling
from vitpar_cli.search import search
from vitpar_cli.search_view import SHOWN
from vitpar_cli.validate import validate

Run = Callable[..., str]
ROOT = Path(__file__).parents[2]
H100 = ("--cluster", "8xH100", "--model", "vit_small_patch16_224", "--batch-size", "256", "--precision", "bf16")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs `vitpar search` on a console of 120 columns."""
    monkeypatch.setenv("COLUMNS", "120")
    return partial(printed, search)


def test_without_plotly_pages_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotly, "find_spec", lambda name: None)
    plotly.library.cache_clear()
    for command in (search, scaling):
        with pytest.raises(DataError, match=r"charts need Plotly, .*: pip install -e '\.\[report\]'"):
            printed(command, *H100, "--report", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


def test_search_writes_a_plan_and_a_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["vitpar", "search", "--memory", "20 GB"])
    plan, report = (tmp_path / name for name in ("plan.json", "report.html"))
    searched = (*H100, "--memory", "20GB", "--without", "2d,3d,2.5d", "--out", str(plan))
    words = run(*searched, "--report", str(report))
    best = read_plan(plan)
    assert words.startswith(str(best)) and "why not" in words and "times are estimates" in words
    assert f"vitpar {__version__}: vitpar search --memory '20 GB'" in words
    assert "in bf16, compiled on 8 ranks of NVIDIA H100" in words and "per step of 256 samples, MFU" in words
    assert best.world_size == 8
    text = report.read_text()
    assert Page(text).outside == []
    assert {"Samples/s by memory", "Time of a step", "Samples/s by speed of links"} <= set(charts_of(text))

    found = json.loads(run(*searched, "--json"))
    assert found["search_seconds"] > 0 and found["exact"] in (True, False) and found["command"].endswith("'20 GB'")
    assert (found["vitpar"], found["precision"], found["model"]) == (__version__, "bf16", "vit_small_patch16_224")
    best = found["plans"][0]
    assert sum(best["step_breakdown_seconds"].values()) == pytest.approx(best["step_seconds"]) and 0 < best["mfu"] < 1
    assert best["memory_bytes"] == max(part["total"] for part in best["memory_breakdown_bytes"]) <= 20e9
    assert found["images_per_second_bound"] >= best["images_per_second"] * (1 - 1e-9)
    speeds = [point["images_per_second"] for point in found["frontier"]]
    assert speeds == sorted(speeds, reverse=True)
    assert {row["strategy"] for row in found["why_not"]} >= {"tp8", "pp8"}
    assert f"--mesh {plan} --batch-size 256" in found["train"]


def test_plans_are_not_truncated_on_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    arguments = (*H100, "--memory", "1GB", "--roles", "dp,fsdp")
    words = run(*arguments)
    found = json.loads(run(*arguments, "--json"))
    listed = found["plans"][: 1 + SHOWN] + found["frontier"][1:]
    assert len(listed) > 3
    for plan in listed:
        assert plan["strategy"] in words and "…" not in words


@pytest.mark.slow
def test_options_restrict_the_search_and_stand_in_the_suggested_command(run: Run) -> None:
    given = ("--roles", "pp,tp", "--without", "gpipe,sp,2d", "--memory", "20GB", "--batch-size", "32,512")
    found = json.loads(run(*H100, *given, "--image-size", "384", "--json"))
    for plan in found["plans"]:
        assert not re.search(r"dp[2-9]|sp|2d", plan["strategy"]) and plan["plan"]["schedule"] != "gpipe"
    assert found["plans"][0]["batch_size"] == 512 and "--batch-size 512" in found["train"]
    for words in ("--model vit_small_patch16_224", "--precision bf16", "--set model.image_size=384"):
        assert words in found["train"], words
    found = json.loads(run(*H100, "--roles", "pp", "--without", "ckpt,offload", "--json"))
    assert f"--schedule {found['plans'][0]['plan']['schedule']}" in found["train"]


@pytest.mark.slow
def test_search_says_how_long_a_training_takes_and_what_would_help(run: Run, tmp_path: Path) -> None:
    words = run(*H100, "--epochs", "90", "--roles", "dp,fsdp")
    assert "90 epochs of 1,281,167 samples; input, evaluation and checkpoints not included" in words
    assert "ImageNet-1k's 1,281,167 images are assumed: name other data with --data" in words
    assert "time       computing 9" in words
    assert re.search(r"\nwhat would help\n(.*\n){1,2} +-\d.* devices and hosts that compute twice as fast ", words)
    assert "--epochs 90" in words.partition("train   ")[2]
    waiting = run(*H100, "--epochs", "90", "--images-per-second", "1000", "--roles", "dp")
    assert "samples; evaluation and checkpoints not included" in waiting
    assert "input      the hosts prepare 1,000 " in waiting
    sheet = tmp_path / "ours.toml"
    text = (ROOT / "examples/clusters/4x8xH100-ethernet.toml").read_text()
    sheet.write_text(text.replace("[host]", "[host]\nimages_per_second = 1000"))
    waiting = run("--cluster", str(sheet), *H100[2:], "--roles", "dp")
    assert "the hosts prepare 4,000 samples/s: devices wait " in waiting
    (recipe,) = json.loads(printed(recipes, "deit_small", "--images-per-second", "3000", "--json"))["recipes"]
    assert recipe["gpu_hours"] == pytest.approx(300 * 1_281_167 / 3000 / 3600 * 8, rel=0.01)
    found = json.loads(run(*H100, "--epochs", "90", "--roles", "dp,fsdp", "--json"))
    best, training = found["plans"][0], found["training"]
    assert training["steps"] == 450_411  # 90 * 1,281,167 / 256
    assert training["seconds"] == pytest.approx(450_411 * best["step_seconds"])
    assert training["device_hours"] == pytest.approx(8 * training["seconds"] / 3600)
    assert sum(best["step_shares"].values()) == pytest.approx(1)
    assert "devices and hosts that compute twice as fast" in {gain["change"] for gain in found["what_would_help"][:2]}
    assert found["batch_sizes"] == []


def test_every_batch_size_has_a_row(run: Run) -> None:
    given = (*H100[:4], "--precision", "bf16", "--memory", "2GB", "--batch-size", "64,512", "--roles", "dp,fsdp")
    words = run(*given)
    assert re.search(
        r"best plan for each batch size\n.*batch.*days.*GPU-hours.*\n +8xH100 +8 +64 .*\n( {6}.*\n)? +8x", words
    )
    found = json.loads(run(*given, "--json"))
    rows = {row["batch_size"]: row for row in found["batch_sizes"]}
    assert [*rows] == [64, 512] and found["plans"][0]["batch_size"] == 512
    assert rows[512]["images_per_second"] == pytest.approx(found["plans"][0]["images_per_second"], rel=2e-3)
    assert [rows[images]["training"]["steps"] for images in rows] == [6_005_471, 750_684]  # 300 * 1,281,167 / images


def test_table_compares_clusters_models_and_sizes(run: Run, tmp_path: Path) -> None:
    slow = (ROOT / "examples/clusters/4x8xH100-ethernet.toml").read_text()
    file = tmp_path / "slow.toml"
    file.write_text(slow.replace("nodes = 4\ndevices_per_node = 8", "nodes = 1\ndevices_per_node = 2"))
    models, clusters = "vit_tiny_patch16_224,vit_large_patch16_224", f"1xH100,{file}"
    given = ("--cluster", clusters, "--model", models, "--image-size", "224,336", "--batch-size", "16", "--roles", "dp")
    found = json.loads(run(*given, "--memory", "2GB", "--json", "--epochs", "1"))
    rows = {(row["model"].split("_")[1], row["image_size"], row["cluster"]): row for row in found["rows"]}
    assert len(rows) == 8 and "times are estimates: nothing was measured" in found["notes"]
    for size in (224, 336):
        one, two = (rows["tiny", size, name] for name in ("1xH100", "slow"))
        assert (one["devices"], two["devices"]) == (1, 2)
        assert two["training"]["device_hours"] == pytest.approx(2 / 3600 * two["training"]["seconds"])
        assert "no plan fits into 2 GB per rank" in rows["large", size, "1xH100"]["why"]
    assert rows["tiny", 224, "slow"]["images_per_second"] > rows["tiny", 336, "slow"]["images_per_second"] > 0
    words = run(*given, "--memory", "2GB", "--epochs", "1")
    assert words.count("no plan fits into 2 GB per rank\n") == sum("why" in row for row in found["rows"])
    for title in ("vit_tiny_patch16_224, 224 pixels", "vit_large_patch16_224, 336 pixels"):
        assert f"\n{title}\n" in words
    assert words.count("times are estimates") == 1 and "; computing" in words


def test_combinations_that_no_model_or_device_allows_are_rows(run: Run) -> None:
    given = ("--cluster", "2xH100,2xA100", "--model", "vit_huge_patch14_224", "--batch-size", "64", "--image-size")
    rows = json.loads(run(*given, "224", "--precision", "fp8", "--json"))["rows"]
    assert "why" not in rows[0] and "2xA100 has no rate of float8" in rows[1]["why"]
    rows = json.loads(run(*given, "224,384", "--precision", "bf16", "--json"))["rows"]
    assert [row["image_size"] for row in rows] == [224, 224, 384, 384]
    assert all("patches of 14 pixels do not tile images of 384" in row["why"] for row in rows[2:])


INVALID = [
    (("--memory", "24"), "--memory 24 is not a size: use a number and a unit"),
    (("--batch-size", "a"), "--batch-size a is not a number: use 256"),
    (("--set", "train.seed=3"), "--set train.seed changes nothing in a search"),
    (("--image-size", "0"), "--image-size is 0: use 1 to"),
    (("--model", "vit_small_patch16_224,vit_none"), "unknown model 'vit_none'"),
    (("--cluster", "8xH100,8xA100", "--out", "plan.json"), "--out is of one search, but several clusters"),
    (("--image-size", "224,384", "--report", "r.html"), "--report is of one search, but several clusters"),
    (("--cluster", "8xA100", "--precision", "fp8"), "8xA100 has no rate of float8 matrix products: plan for bf16"),
    (("--out", "no/such/folder/plan.json"), "cannot write no/such/folder/plan.json: give a file in"),
]
"""Options of a search on a cluster, and what is said."""
WITHOUT_EFFECT: list[tuple[Any, tuple[str, ...], str]] = [
    (search, ("--num-classes", "5"), "--num-classes is given without --cluster"),
    (search, ("--image-size", "8,16"), "profiles are of one model: add --cluster"),
    (validate, ("--microbatches", "2"), "--microbatches is given, but these plans have their own"),
    (validate, ("plan.json", "--microbatches", "2"), "--microbatches is given, but these plans have their own"),
    (validate, ("dp2", "--out", "no/rows.json"), "cannot write no/rows.json"),
    (validate, (), "cannot read the hardware profile hardware.json"),
]


@pytest.mark.parametrize(
    ("command", "words", "sentence"), [*((search, (*H100, *words), said) for words, said in INVALID), *WITHOUT_EFFECT]
)
def test_invalid_options_are_refused(
    command: Any, words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(sentence)):
        printed(command, *words)


def test_accuracy_uses_absolute_errors() -> None:
    def row(predicted: float, measured: float, memory: int, peaks: list[int | None]) -> dict[str, Any]:
        known = {"predicted_seconds": predicted, "measured_seconds": measured}
        return known | {"runs": [[measured]], "predicted_memory_bytes": memory, "measured_memory_bytes": peaks}

    found = accuracy([row(1.1, 1.0, 100, [90, 100]), row(1.8, 2.0, 90, [100, None])])
    assert found["time_error"] == pytest.approx({"mean": 0.1, "largest": 0.1})
    assert found["memory_error"] == pytest.approx({"mean": 0.05, "largest": 0.1})
    assert found["rank_correlation"] == 1 and found["chosen_slower_than_best"] == 0
    assert spearman([1, 2, 3], [9, 5, 1]) == pytest.approx(-1)


def test_profile_is_valid_for_models_of_equal_cost(tmp_path: Path) -> None:
    def recipe(**changed: Any) -> Recipe:
        values = {"model.name": "vit_nano_patch4_16", "data.path": "x", "train.steps": 1}
        return read_recipe(None, values | {name.replace("__", "."): value for name, value in changed.items()})

    hardware = find_cluster("8xH100").hardware()
    model = estimate_model(recipe().config(10), "fp32", hardware, ("tp1",))
    files = tmp_path / "hardware.json", tmp_path / "model.json"
    hardware.save(files[0])
    model.save(files[1])
    MachineOptions(*files).costs(recipe(model__init="timm", model__norm_eps=1e-12))
    with pytest.raises(PlannerError, match=r"was profiled with model depth 8 but the recipe has 4"):
        MachineOptions(*files).costs(recipe(model__depth=4))
