"""The dry bench: kernels of a compiled block on a GPU that does not exist, compared with formulas and with limits."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from bench.dry.roofline import estimate, rates_of
from bench.dry.tables import Row, kernels, summary
from bench.dry.work import BlockWork, Graph, Launch, Resources
from bench.gpu_models import MODELS
from bench.simulated_gpu.library import compiler
from bench.simulated_gpu.requirements import TRITON, WITHOUT_TRITON, has_triton
from helpers.paths import ROOT
from vitpar.models import model_config
from vitpar.planner.profile.activations import vitpar_elements
from vitpar.planner.profile.cluster import find_cluster
from vitpar.strategy import parse

BASE = next(iter(MODELS))
PASSES = {"plain": 41.5, "drop_path": 45.5, "dropout": 49.5, "packed": 35.4, "fp8": 61.8}
"""Passes over tokens x width a block of B/16, at most: those of today. A change that moves more bytes must say why, and
one that moves fewer lowers the limit. The limits hold on torch 2.11 and 2.13."""
OLD = int(version("torch").split(".")[1]) < 13
FEWER = {"drop_path": 3.2} if OLD else {}
"""Passes that torch before 2.13 saves by variant."""


def run(*words: str, blocked: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
    """Run the program. blocked: packages that cannot be imported."""
    start = f"import sys, runpy; sys.modules |= dict.fromkeys({blocked!r}); sys.argv = sys.argv[1:]; " + (
        "sys.path.insert(0, 'experiments'); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", start, "experiments/dry_bench.py", *words]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **ours}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the JSON of B/16 by variant."""
    if not has_triton():
        pytest.skip(WITHOUT_TRITON)
    if compiler() is None:
        pytest.skip("needs a C++ compiler: c++, g++, clang++, or the one that CXX names")
    folder, found = tmp_path_factory.mktemp("dry_bench"), {}
    for variant in PASSES:
        file = folder / f"{variant}.json"
        done = run("--models", BASE, "--variant", variant, "--json", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
        (found[variant],) = json.loads(file.read_text())["models"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("variant", PASSES)
def test_block_moves_no_more_bytes_than_today_and_spills_nothing(
    variant: str, counted: dict[str, dict[str, Any]]
) -> None:
    assert counted[variant]["block"]["passes"] <= PASSES[variant]
    assert counted[variant]["block"]["passes"] > PASSES[variant] - FEWER.get(variant, 1), "lower the limit"
    found = counted[variant]["block"]["resources"]
    assert len(found) > 10 and all(one["registers"] > 0 for kinds in found.values() for one in kinds)
    assert {name: kinds for name, kinds in found.items() if any(one["spills"] for one in kinds)} == {}


@pytest.mark.slow
@pytest.mark.parametrize("variant", PASSES)
def test_products_and_attention_are_those_of_the_model(variant: str, counted: dict[str, dict[str, Any]]) -> None:
    block, batch = model_config(BASE).layers["blocks.0"], MODELS[BASE].batches[0][1]
    assert block.attention is not None
    launches = [launch for graph in counted[variant]["block"]["graphs"] for launch in graph["launches"]]
    products = [launch for launch in launches if launch["kind"] == "product"]
    assert sum(launch["flops"] for launch in products) == batch * (block.flops - 3 * block.attention.flops)
    dtypes = [launch["dtype"] for launch in products]
    assert dtypes.count("bfloat16") == (4 if variant == "fp8" else 12) and len(dtypes) == 12
    forward, backward = (launch for launch in launches if launch["kind"] == "attention")
    shape = block.attention
    assert forward["shape"] == backward["shape"] == [batch, shape.heads, shape.tokens, shape.head_dim]
    assert forward["flops"] == batch * shape.flops


@pytest.mark.slow
def test_saved_activations_and_float8_are_those_of_the_planner(counted: dict[str, dict[str, Any]]) -> None:
    work, config, batch = counted["plain"]["block"], model_config(BASE), MODELS[BASE].batches[0][1]
    # Two norms' inputs and outputs, q, k, v, the output of attention, and twice the MLP's hidden features.
    assert work["saved"] == pytest.approx(16 * batch * config.tokens * config.embed_dim * 2, rel=0.01)
    assert counted["fp8"]["step"]["planner"] == pytest.approx(counted["fp8"]["step"]["step"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "drop_path", "dropout"])
def test_planner_prices_the_counted_bytes(variant: str, counted: dict[str, dict[str, Any]]) -> None:
    config = model_config(BASE, **({} if variant == "plain" else {variant: 0.1}))
    work, step = counted[variant]["block"], counted[variant]["step"]
    block = config.layers["blocks.1"]
    priced = vitpar_elements(config, block, parse("tp1").strategy)
    for graph, elements in zip(work["graphs"], priced, strict=True):
        moved = sum(launch["bytes"] for launch in graph["launches"] if launch["kind"] in ("triton", "small"))
        passes = elements / block.gives.elements
        assert passes == pytest.approx(moved / work["activation"], rel=0.03, abs=FEWER.get(variant))
    assert step["planner"] == pytest.approx(step["step"], rel=0.015 if OLD else 0.01)


def launch(kind: Any, name: str, passes: float, **fields: Any) -> Launch:
    """Return a kernel that moves `passes` passes of 1,000 bytes."""
    return Launch(kind, name, round(1000 * passes), **fields)


def small_work() -> BlockWork:
    """Return the work of a block that is made up."""
    product = {"flops": 10**9, "shape": (8, 8, 8), "widest": 500}
    forward = (
        launch("product", "mm", 2, **product),
        launch("attention", "attend", 4, flops=10**6, shape=(512, 12, 197, 64)),
    )
    backward = (launch("triton", "triton_poi", 3), launch("small", "sum", 0.05), launch("triton", "triton_red", 0.01))
    spills = (Resources(255, 8, 0, 4),)
    found = {"triton_poi": (*spills, Resources(32, 0, 1024, 8)), "triton_red": spills}
    return BlockWork((Graph(False, forward, 7000), Graph(True, backward)), 1000, found)


def test_passes_leave_out_products_and_attention() -> None:
    work = small_work()
    assert work.passes == pytest.approx(3.06) and work.saved == 7000
    assert work.spilling == ("triton_red",), "another configuration of triton_poi spills nothing"


def test_estimate_adds_up_rates_of_the_data_sheet() -> None:
    config, work = model_config(BASE), small_work()
    sheet, rates = find_cluster("1xH200"), rates_of("H200")
    found = estimate(config, 512, work, rates, "bf16")
    assert sheet.sustained_memory is not None
    memory, products = sheet.memory_bandwidth * sheet.sustained_memory, sheet.matmul["bfloat16"] * sheet.sustained
    assert found.seconds.memory == pytest.approx(12 * 3060 / memory, rel=1e-3)
    assert found.seconds.products == pytest.approx(12 * (1e9 / products + 1024 / memory), rel=1e-3)
    assert found.mfu(found.seconds.step) == pytest.approx(512 * config.flops / found.seconds.step / 989.4e12)
    faster = estimate(config, 512, work, rates_of("H200", 2 * products), "bf16")
    assert faster.seconds.attention == pytest.approx(found.seconds.attention / 2, rel=1e-3)
    assert faster.seconds.memory == found.seconds.memory


def test_tables_show_ranges_over_configurations_and_add_up_small_kernels() -> None:
    config, work = model_config(BASE), small_work()
    row = Row(config, 512, work, estimate(config, 512, work, rates_of("H200"), "bf16"))
    shown = "\n".join([*summary([row]), *kernels(row)])
    assert "| backward | `triton_poi` | 3.00 |  |  | 32–255 | 0–8 | 0–1 |" in shown
    assert "| both | 2 small kernels | 0.06 |  |  | 255 | 8 | 0 |" in shown
    assert json.loads(json.dumps(row.to_json()))["block"]["passes"] == work.passes


def test_mistakes_are_refused_before_torch_is_loaded() -> None:
    done = run("--gpu", "A100", "--variant", "fp8", blocked=("torch",))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the A100 cannot multiply in float8: use --gpu H100 or H200" in done.stderr
    done = run(blocked=("torch", "triton"))
    assert done.returncode == 2 and f"pip install --no-deps triton=={TRITON}" in done.stderr.splitlines()[-1]


def test_tested_version_of_triton_is_named_everywhere() -> None:
    assert f"triton=={TRITON}" in (ROOT / "constraints.txt").read_text().splitlines()
    assert f"triton=={TRITON}" in Path(ROOT, "experiments/dry_bench.py").read_text(), "its help names the command"
