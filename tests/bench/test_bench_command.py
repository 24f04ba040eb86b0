"""`vitpar bench`: phases that add up, correct limits, loadable traces, and refusals."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from helpers.command_line import Refused, run
from helpers.ranks import Ranks
from helpers.small_data import CLASSES
from helpers.trained import recipe_of
from vitpar.bench import Settings, bench
from vitpar.bench.limits import matmul_rates, measure_limits, rank_flops, update_bytes
from vitpar.bench.run import STEADY, Feed, StepRunner
from vitpar.recipe import Recipe
from vitpar.recipe.machine import replace_auto_precision
from vitpar.sharded import local
from vitpar.tasks.data import open_split
from vitpar.tasks.inputs import build_input
from vitpar.training.build import TrainingComponents, build
from vitpar_cli import bench as command
from vitpar_cli.plan_view import percent

Result = dict[str, Any]
CPU = torch.device("cpu")
SETTINGS = Settings(steps=2, repeats=2)
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm"}
OF_A_STEP = ["waiting for gradients", "norm and clipping", "update"]


@pytest.fixture(autouse=True)
def nobody_launched_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the launcher variables left by a test that joined a world."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def measured(device: torch.device, recipe: Recipe, traces: Path) -> Result:
    """Benchmark a recipe; runs on every rank."""
    recipe = replace_auto_precision(recipe, "cpu")
    config = recipe.config(CLASSES)
    return bench(recipe, config, recipe.plan(config), device, open_split(recipe, "train"), SETTINGS, traces=traces)


def trained_parts(device: torch.device, recipe: Recipe) -> TrainingComponents:
    recipe = replace_auto_precision(recipe, "cpu")
    config = recipe.config(CLASSES)
    return build(recipe, config, recipe.plan(config), device)


@pytest.fixture(scope="module")
def one(ranks: Ranks, data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """Return a benchmark of dp1 with the recipe's data, and the folder of its trace."""
    folder = tmp_path_factory.mktemp("traces")
    (found,) = ranks(1).run(measured, recipe_of(data, "dp1"), folder)
    return found, folder


def adds_up(found: Result) -> None:
    seconds, whole = [phase["seconds"]["mean"] for phase in found["phases"]], found["phased_step_seconds"]["mean"]
    assert all(s > 0 for s in seconds)
    assert sum(seconds) + found["between_seconds"] == pytest.approx(whole)
    assert -0.01 * whole < found["between_seconds"] < 0.6 * whole


def check_trace(path: Path) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    assert {event.get("name") for event in events} & PRODUCTS


def test_phases_of_one_process_add_up_and_have_their_limits(one: tuple[Result, Path]) -> None:
    found, _ = one
    adds_up(found)
    limits = {phase["name"]: phase["limit_seconds"] for phase in found["phases"]}
    assert list(limits) == ["waiting for data", "input", "forward", "backward", *OF_A_STEP]
    assert {name for name, limit in limits.items() if limit} == {"forward", "backward", *OF_A_STEP[1:]}
    seconds = found["step_seconds"]["repeats"]
    assert len(seconds) == len(found["phased_step_seconds"]["repeats"]) == SETTINGS.repeats
    assert found["images_per_second"]["repeats"][0] == pytest.approx(found["batch_size"] / seconds[0])
    assert found["mfu"] is None and found["matmul_share"] > 0 and found["rates"]["bandwidth"] > 0
    assert found["memory_bytes"] > 1e7 and found["warm_up"]["steps"] > STEADY
    assert list(found["start_seconds"]) == ["model", "attention", "first_step"]
    assert found["start_seconds"]["first_step"] > 0


def test_real_input_is_compared_with_synthetic_input_per_repeat(one: tuple[Result, Path]) -> None:
    found, _ = one
    bare, full = (one["repeats"] for one in (found["data"]["synthetic_step_seconds"], found["step_seconds"]))
    saved = [1 - one / other for one, other in zip(bare, full, strict=True)]
    assert found["data"]["share"]["repeats"] == pytest.approx(saved)


def test_top_operators_are_named_and_traced(one: tuple[Result, Path]) -> None:
    found, folder = one
    kernels, config = found["kernels"], recipe_of(Path("x"), "dp1").config(CLASSES)
    assert [k["seconds"] for k in kernels] == sorted((k["seconds"] for k in kernels), reverse=True)
    assert 0.1 < sum(kernel["share"] for kernel in kernels) < 1.02
    products = [kernel for kernel in kernels if kernel["name"] in PRODUCTS]
    attention = config.depth * config.tokens**2 * config.embed_dim * 12  # the profiler counts no FLOPs for attention
    expected = (config.flops - attention) * found["batch_size"]
    assert sum(kernel["flops"] or 0 for kernel in products) == pytest.approx(expected, rel=0.25)
    assert all(kernel["limit_share"] > 0 for kernel in products)
    assert [path.name for path in folder.iterdir()] == ["rank_0.json"]
    check_trace(folder / "rank_0.json")


def test_pipeline_of_two_stages_is_measured_alike_on_both_ranks(ranks: Ranks, data: Path, tmp_path: Path) -> None:
    recipe = recipe_of(data, "pp2", **{"parallel.microbatches": 2, "train.precision": "fp32"})
    first, second = ranks(2).run(measured, recipe, tmp_path)
    assert first == second
    adds_up(first)
    names = [phase["name"] for phase in first["phases"]]
    assert names == ["waiting for data", "input", "pipeline", *OF_A_STEP]
    assert all(one["slowest_rank_seconds"] >= one["seconds"]["mean"] * 0.999 for one in first["phases"])
    for rank in range(2):
        check_trace(tmp_path / f"rank_{rank}.json")


def gradients_have_a_limit(device: torch.device, recipe: Recipe) -> tuple[list[str], float, int]:
    trained = trained_parts(device, recipe)
    with StepRunner(trained).open(Feed(build_input(trained.recipe, trained.model, trained.task))):
        limits = measure_limits(trained)
    sent = sum(size for _, size in trained.model.gradient_messages)
    held = sum(4 * local(p).numel() for _, p in trained.model.named_parameters())
    assert sent == held, "every gradient is summed over both ranks"
    return list(limits.phases), limits.phases["waiting for gradients"], sent


@pytest.mark.slow
def test_reduced_gradients_have_a_limit(ranks: Ranks, data: Path) -> None:
    for names, seconds, sent in ranks(2).run(gradients_have_a_limit, recipe_of(data, "dp2")):
        assert names == ["forward", "backward", *OF_A_STEP]
        assert seconds > 0 and sent > 0


def test_benchmark_steps_change_no_parameter(alone: None, data: Path) -> None:

    recipe = recipe_of(data, "dp1")
    trained = trained_parts(CPU, recipe)
    before = {name: p.detach().clone() for name, p in trained.model.named_parameters()}
    StepRunner(trained).run(Feed(build_input(recipe, trained.model, trained.task), open_split(recipe, "train")), 2)
    assert all(torch.equal(p, before[name]) for name, p in trained.model.named_parameters())
    assert trained.optimizer.state(), "but there were updates"


def test_warmup_ends_when_steps_are_steady(alone: None, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([5.0, 3.0, 1.0, 0.99, 1.2, 0.98, 0.5])
    trained = trained_parts(CPU, recipe_of(data, "dp1"))
    runner, feed = StepRunner(trained), Feed(build_input(trained.recipe, trained.model, trained.task))
    monkeypatch.setattr(runner, "step", lambda take: None)
    monkeypatch.setattr(runner, "most", lambda seconds: next(taken))

    warm = runner.warm_up(feed, None, lambda words: None)
    assert warm == {"steps": 6, "first": 5.0, "steady": True}
    monkeypatch.setattr(runner, "most", lambda seconds: 1.0)
    assert runner.warm_up(feed, 2, lambda words: None)["steps"] == 2


@pytest.mark.parametrize("mesh", ["pp2", "dp2"])
def test_rank_flops_add_up_to_the_model(mesh: str, ranks: Ranks, data: Path) -> None:
    recipe = recipe_of(data, mesh)
    config = recipe.config(CLASSES)
    shares = ranks(2).run(flops_of_a_rank, recipe)
    assert sum(shares) == pytest.approx(config.flops * recipe.train.batch_size)


def flops_of_a_rank(device: torch.device, recipe: Recipe) -> float:
    return sum(rank_flops(trained_parts(device, recipe).model))


def rates_and_bytes(device: torch.device, recipe: Recipe) -> tuple[tuple[float, float], int, tuple[int, int]]:
    trained = trained_parts(device, recipe)
    trained.optimizer.allocate()
    held = sum(4 * local(p).numel() for _, p in trained.model.named_parameters())
    return matmul_rates(trained.model), held, update_bytes(trained)


def test_rates_and_update_bytes_match_the_step(ranks: Ranks, data: Path) -> None:
    ((rates, held, (norm, update)),) = ranks(1).run(rates_and_bytes, recipe_of(data, "dp1"))
    assert all(1e7 < rate < 1e14 for rate in rates)
    assert norm == 3 * held
    # AdamW reads parameter, gradient and two moments, and writes all but the gradient: 7. The moving average adds 3.
    assert update == pytest.approx((7 + 3) * held, rel=0.01)


def test_output_fits_the_terminal(one: tuple[Result, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False, color_system=None)
    monkeypatch.setattr(command, "Console", lambda **_: console)
    made = recipe_of(Path("x"), "dp1")
    command.show(one[0], config := made.config(CLASSES), made.plan(config), Path("traces"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for phase in one[0]["phases"]:
        assert f"\n{phase['name']} " in text
    for kernel in one[0]["kernels"][: command.KERNELS]:
        assert f" {percent(kernel['share'])} " in text


RECIPE = """
[model]
name = "vit_custom"
image_size = 8
patch_size = 4
embed_dim = 24
depth = 2
num_heads = 2

[data]
path = "nowhere"
"""
KEYS = {
    *("model", "plan", "schedule", "microbatches", "ranks", "batch_size", "precision", "compile", "attention"),
    *("device", "device_name", "warm_up", "steps", "step_seconds", "images_per_second", "mfu", "matmul_share", "rates"),
    *("memory_bytes", "data", "phased_step_seconds", "start_seconds", "phases", "between_seconds", "kernels"),
    "warnings",
}


def test_synthetic_bench_prints_one_json_object(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    words = ["bench", "--recipe", "recipe.toml", "--batch-size", "8", "--mesh", "dp1", "--synthetic", "--json"]
    done = run(tmp_path, [*words, "--steps", "2", "--repeats", "2", "--warmup", "2", "--profile", "a/b"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == KEYS
    assert (found["plan"], found["ranks"], found["batch_size"], found["data"]) == ("dp1", 1, 8, None)
    assert found["warm_up"]["steps"] == 2 and len(found["step_seconds"]["repeats"]) == 2
    assert [phase["name"] for phase in found["phases"]][:2] == ["forward", "backward"]
    for phase in found["phases"]:
        assert phase.keys() == {"name", "seconds", "slowest_rank_seconds", "limit_seconds", "limit_share"}
    assert found["kernels"][0].keys() == {"name", "seconds", "calls", "share", "flops", "limit_share"}
    assert (tmp_path / "a" / "b" / "rank_0.json").is_file()
    assert "profiler_start" not in done.stderr


INVALID = [
    (["--set", "optimizer.lr=1"], "--set optimizer.lr changes nothing in a benchmark without data, which uses "),
    (["--set", "data.workers=1"], "--set data.workers changes nothing in a benchmark without data"),
    (["--set", "augment.mixup=0.1", "--recipe", "recipe.toml", "--synthetic"], "--set augment.mixup changes"),
    (["--set", "checkpoint.keep=1", "--recipe", "recipe.toml"], "changes nothing in a benchmark, which uses "),
    (["--recipe", "recipe.toml"], "nowhere"),
    (["--data", "here", "--synthetic"], "both --synthetic and --data here are given: keep one"),
    (["--recipe", "recipe.toml", "--num-classes", "5"], "--num-classes 5 does nothing with data"),
    (["--mesh", "tp2", "--model", "vit_tiny_patch16_224"], "tp2 does not divide the 3 heads of vit_tiny_patch16_224"),
    (["--profile", "recipe.toml"], "cannot write into 'recipe.toml' (File exists): give --profile"),
]


def test_invalid_bench_options_are_refused(tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "dataset.json").write_text("{}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    refused(tmp_path, INVALID, "bench")
