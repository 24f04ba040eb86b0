"""Benchmark programs in experiments/ run, measure what they claim, and refuse contenders that compute differently."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import bench_cpu
from bench.harness import Spread, ratio, take_turns
from helpers.paths import ROOT
from vitpar.parallel.float8 import float8_fault


def run(program: str, *arguments: str, path: Path = ROOT / "src") -> str:
    """Run a program of experiments/ and return its output.

    path: folder whose packages are found first
    """
    done = subprocess.run(
        [sys.executable, f"experiments/{program}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.tools
def test_cpu_program_prints_a_ratio(tmp_path: Path) -> None:
    printed = run("bench_cpu.py", "--quick", "--only", "dp2", "--json", str(tmp_path / "result.json"))
    (case,) = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert case["ratio"]["wall"]["middle"] > 0
    assert f"{case['ratio']['wall']['middle']:.3f} ±" in printed
    assert len(case["seconds"]["hand"]["wall"]) == len(case["seconds"]["vitpar"]["wall"]) >= 5


@pytest.mark.tools
def test_gpu_program_runs_on_cpu(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--tiny", "--steps", "1", "--json", str(tmp_path / "result.json"))
    printed = run("bench_gpu.py", *arguments)
    found = json.loads((tmp_path / "result.json").read_text())
    float8 = float8_fault(torch.device("cpu")) is None  # torch 2.11 has no float8 matmul on CPUs
    rows = {"limits": 1, "vitpar": 1, "phases": 1, "input": 1, "fp8": int(float8)}
    assert {section: len(found[section]) for section in rows} == rows
    assert [part.split(",")[0] for part in found["left_out"]] == ([] if float8 else ["fp8"])
    assert all(found["limits"][0][rate] > 0 for rate in ("burst", "sustained", "copy"))
    assert list(found["phases"][0]["ms"])[:2] == ["forward", "backward"]
    assert "relative difference" in printed
    (row,) = found["input"]
    assert 60_000 < row["mean_bytes"] < 160_000  # about the size of ImageNet's files
    assert len(row["seconds"]["JPEG"]) == len(row["seconds"]["synthetic"]) >= 2
    assert row["input_alone"] > 0


@pytest.mark.tools
def test_peers_program_compares_available_contenders_and_names_missing_ones(tmp_path: Path) -> None:
    arguments = ("--tiny", "--rounds", "2", "--precision", "fp32", "--json", str(tmp_path / "result.json"))
    contenders = ("vitpar_step", "plain", "timm_loop")
    with_nobody = tmp_path / "timm"
    with_nobody.mkdir()
    (with_nobody / "__init__.py").write_text("raise RuntimeError('operator does not exist')")
    printed = run("bench_peers.py", *arguments, "--only", *contenders, path=tmp_path)
    (case,) = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert [row["contender"] for row in case["rows"]] == ["vitpar_step", "plain"]
    assert len({row["parameters"] for row in case["rows"]}) == 1
    assert case["left_out"] == {"timm, plain loop": "missing: RuntimeError: operator does not exist"}
    assert all(len(row["wall"]) == 2 and min(row["wall"] + row["cpu"]) > 0 for row in case["rows"])
    assert "timm, plain loop is left out" in printed


@pytest.mark.tools
def test_peers_train_a_swin_as_timm_does() -> None:
    """Losses and gradient norms of three steps in the loop of all contenders, from the same parameters."""
    from helpers.oracles import timm

    assert timm  # imported first: timm needs torchvision, which may not match this torch
    from bench.peers.contenders import batches, start_as_ours, timms
    from bench.peers.job import Job
    from bench.plain_loop import initial_model, plain_step

    options = {"embed_dim": 12, "depths": [2, 2], "num_heads": [3, 6], "num_classes": 10}
    job = Job("timm_loop", "swin_tiny_patch4_window4_64", 4, options)
    theirs = timms(job)
    start_as_ours(theirs, job)
    ours = initial_model(job.config)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert counts == [job.config.parameters] * 2
    steps = [plain_step(model) for model in (ours, theirs)]
    for images, labels in batches(job):
        (loss, norm), (expected, expected_norm) = (step(images, labels) for step in steps)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert norm.item() == pytest.approx(expected_norm.item(), rel=1e-4)


def test_contenders_take_turns_in_alternating_order() -> None:
    calls: list[str] = []
    contenders = {name: partial(calls.append, name) for name in ("a", "b")}
    times = take_turns(contenders, 3, partial(calls.append, "|"))
    assert "".join(calls) == "|b||a||a||b||b||a|"
    assert len(times["a"].wall) == len(times["b"].cpu) == 3


def test_ratio_is_computed_pair_by_pair() -> None:
    slow_spell = [1.0, 1.0, 10.0, 10.0, 1.0]
    assert ratio([1.1 * s for s in slow_spell], slow_spell) == Spread(pytest.approx(1.1), pytest.approx(0.0))


def test_different_losses_are_refused() -> None:
    bench_cpu.compare([(2.0, 3.0)], [(2.0001, 3.0)], 1e-4)
    with pytest.raises(AssertionError, match=r"gradient norm of step 2 is 3\.0 by hand"):
        bench_cpu.compare([(2.0, 3.0)] * 2, [(2.0, 3.0), (2.0, 3.01)], 1e-4)
