"""Programmes for a GPU: limits, running, reports, and rates that are fitted to measurements."""

import itertools
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gpu_micro
import gpu_refit
from bench.gpu_models import MODELS
from bench.one_gpu import block_layers
from bench.programme.bundle import COMMAND_LETTERS, PACKAGES, command
from bench.programme.compared import memory_rate, padded_flops
from bench.programme.programmes import CALL_S, PROGRAMME_S, PROGRAMMES, RESULT, ROOT, Job
from bench.programme.report import report
from bench.programme.results import Results, merged
from bench.programme.running import run_step
from vitpar.models import ViTConfig, model_config
from vitpar.planner.profile.cluster import Cluster, find_cluster
from vitpar.planner.profile.profiles import Kernels

BASE = next(iter(MODELS))
CALL = {"hardware": "NVIDIA H200", "cuda": True, "date": "2026-11-26", "commit": "abc"}


def test_programmes_fit_the_time_of_a_gpu() -> None:
    for name, calls in PROGRAMMES.items():
        assert sum(call.limit for call in calls) <= PROGRAMME_S
        for number, call in enumerate(calls, start=1):
            assert call.limit <= CALL_S and len(command(name, number, "0" * 40)) <= COMMAND_LETTERS
        jobs = [job for call in calls for job in call.jobs]
        assert all(job.command[0] == "-m" or (ROOT / job.command[0]).exists() for job in jobs)
        assert len({job.name for job in jobs}) == len(jobs), "results are kept by name"


def test_every_dependency_travels_or_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {name.partition(">")[0].replace("-", "_") for name in project}
    present = {"torch", "einops", "rich", "typer", "numpy", "pillow", "safetensors"}
    assert needed == present | {"webdataset", "pydantic", "simplejpeg", "tomli_w"}
    assert needed - present <= set(PACKAGES)


PROGRAM = """
import json, pathlib, subprocess, sys, time
pathlib.Path(sys.argv[1]).write_text(json.dumps({"rows": [1]}))
print("a line", flush=True)
if sys.argv[2] == "fails": sys.exit(3)
if sys.argv[2] == "hangs":
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.tools
def test_program_is_stopped_at_its_limit_and_its_rows_are_kept(tmp_path: Path) -> None:
    results = Results(tmp_path, CALL)
    limits = {"ends": 60.0, "fails": 60.0, "hangs": 4.0}
    jobs = [Job(name, limit, "none", ("-c", PROGRAM, RESULT, name)) for name, limit in limits.items()]
    assert not run_step(jobs, results, tmp_path)
    runs = {run["job"]: run for run in merged([tmp_path])["runs"]}
    ends = {name: run["ended"] for name, run in runs.items()}
    assert ends == {"ends": "ended", "fails": "exit code 3", "hangs": "stopped at its time limit"}
    assert all(run["found"] == {"rows": [1]} for run in runs.values())
    child = Path("/proc") / runs["hangs"]["last_lines"][1]
    assert not child.exists() or "Z (zombie)" in (child / "status").read_text(), "its child still runs"
    assert "hangs: a line" in (tmp_path / "log.txt").read_text()


def test_last_run_with_measurements_counts(tmp_path: Path) -> None:
    for folder, found in (("one", {"rows": [1]}), ("two", {"rows": [2]}), ("three", None)):
        Results(tmp_path / folder, CALL).keeper(Job("steps", 1, "none", ()))({"ended": "ended", "found": found})
    (run,) = merged([tmp_path / name for name in ("one", "two", "three")])["runs"]
    assert run["found"] == {"rows": [2]} and run["call"] == 1
    with pytest.raises(ValueError, match=r"four has no results.json: name the folder"):
        merged([tmp_path / "four"])


def micro_rows(sheet: Cluster) -> list[dict[str, Any]]:
    """Return rows of gpu_micro.py on a GPU that runs exactly at the rates of `sheet`, 10 % faster in bursts."""
    memory, product = memory_rate(sheet), sheet.matmul["bfloat16"] * sheet.sustained * 1.1
    rows: list[dict[str, Any]] = [{"what": "copy", "bytes_per_second": memory}]
    for name, model in MODELS.items():
        config = model_config(name)
        assert isinstance(config, ViTConfig)
        batch = model.batches[0][1]
        tokens = batch * config.tokens
        for (layer, (inner, outer)), kind in itertools.product(block_layers(config).items(), ("forward", "weight")):
            flops, widest = 2 * tokens * inner * outer, 2 * tokens * max(inner, outer)
            facts = {"model": name, "batch_size": batch, "layer": layer, "kind": kind, "flops": flops, "widest": widest}
            rows.append({"what": "product", "seconds": flops / product + widest / memory, **facts})
        shape = (batch, config.num_heads, config.tokens, config.embed_dim // config.num_heads)
        once = padded_flops(shape, sheet.kernels.attention_tile) / (product * sheet.kernels.attention)
        for kernel, slower in (("cudnn", 1), ("flash", 2)):
            rates = {"flops": 1, "forward": slower * once, "backward": 2 * slower * once, "repeatable": True}
            rows.append({"what": "attention", "shape": list(shape), "kernel": kernel, **rates})
    rows.append({"what": "attention", "shape": [1, 1, 1, 1], "kernel": "efficient", "error": "RuntimeError: no"})
    return [*rows, {"what": "sustained", "burst": 1.0, "seconds": 1.1}]


def step_row(seconds: float) -> dict[str, Any]:
    attention = {"backend": "cudnn"}
    facts = {"model": BASE, "batch_size": 512, "mfu": 0.5, "waits": 0.0, "memory_bytes": 2**30, "attention": attention}
    return {**facts, "seconds": [seconds] * 3, "kernels": [500, seconds - 500 * 3e-6]}


def test_fit_recovers_the_rates_of_the_measurements(tmp_path: Path) -> None:
    before = find_cluster("1xH200")
    kernels = Kernels(attention=0.45, attention_tile=64, gap=3e-6)
    true = before.model_copy(update={"sustained": 0.7, "sustained_memory": 0.9, "kernels": kernels})
    found = gpu_refit.refitted(before, micro_rows(true), [step_row(0.12)])
    assert (found.sustained, found.sustained_memory) == pytest.approx((0.7, 0.9), rel=1e-6)
    assert found.kernels.attention_tile == 64
    assert (found.kernels.attention, found.kernels.gap) == pytest.approx((0.45, 3e-6), rel=1e-6)
    file = ROOT / "src" / "vitpar" / "clusters" / "H200.toml"
    text = gpu_refit.rewritten(file.read_text(), found, "measured")
    assert gpu_refit.rewritten(text, found, "measured") == text, "a second fit replaces the first"
    again = Cluster.model_validate({**tomllib.loads(text), "name": "H200", "nodes": 1, "devices_per_node": 1})
    assert (again.sustained, again.sustained_memory, again.kernels) == (0.7, 0.9, kernels)
    assert sum("sustained_bandwidth 0.79" in source for source in again.sources) == 1
    assert not any("fitted to H/14" in source for source in again.sources)


def test_report_marks_what_is_far_from_its_prediction() -> None:
    sheet = find_cluster("1xH200")
    check = {"passed": False, "worst": {"error": 1e-3, "allowed": 1e-4, "name": "blocks.0.mlp.fc1.weight"}}
    found = {
        "micro": {"rows": micro_rows(sheet)},
        "check bf16": check,
        "tests": {"counts": {"passed": 3, "failure": 1}, "failed": {"test_a": "assert\n1 | 2"}},
        "steps": {"vitpar": [step_row(0.3)], "left_out": ["vit_giant_patch14_224: 3 s are left"]},
    }
    run = {"call": 0, "prediction": "passes", "ended": "ended"}
    runs = [{**run, "job": job, "found": one} for job, one in found.items()]
    runs.append({**run, "job": "cifar10", "ended": "exit code 1", "last_lines": ["why"], "found": None})
    text = report({"calls": [CALL], "runs": runs})
    assert text.startswith("# NVIDIA H200\n") and json.loads(json.dumps(runs)) == runs
    assert "| copy | 4,320 GB/s | 4,320 GB/s | 1.00 |" in text
    assert f"step of {BASE}, batch 512, by hand | 111.3 ms | 300 ms | 2.70 **!** |" in text
    assert "| check bf16 | passes | **failed** | 1.0e-03 of 1.0e-04 (blocks.0.mlp.fc1.weight) |" in text
    assert "| test_a | assert 1 / 2 |" in text and "left out: vit_giant_patch14_224" in text
    assert "- cifar10 (call 1): exit code 1" in text and "why" in text
    assert "RuntimeError: no" in text, "what does not run is named"


@pytest.mark.slow
def test_rates_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_micro", "--tiny", "--device", "cpu", "--json", str(tmp_path / "micro.json")])
    gpu_micro.main()
    rows = json.loads((tmp_path / "micro.json").read_text())["rows"]
    assert {row["what"] for row in rows} == {"copy", "product", "epilogue", "fp8", "attention", "adamw", "sustained"}
    for row in rows:
        assert "error" not in row or row["what"] in ("attention", "adamw"), row
