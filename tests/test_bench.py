"""The benchmark programs run, measure what they say, and notice when contenders compute unlike things."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

from bench.timing import Spread, ratio, take_turns  # noqa: E402


def run(program: str, *arguments: str, blocked: tuple[str, ...] = ()) -> str:
    """Run a program of experiments/ where the packages `blocked` cannot be imported; what it printed."""
    start = f"import sys, runpy; sys.modules |= dict.fromkeys({blocked!r}); sys.argv = sys.argv[1:]; " + (
        "sys.path.insert(0, 'experiments'); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", start, f"experiments/{program}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cpu_program_prints_a_ratio(tmp_path: Path) -> None:
    printed = run("bench_cpu.py", "--quick", "--only", "dp2", "--json", str(tmp_path / "result.json"))
    (case,) = json.loads((tmp_path / "result.json").read_text())["cases"]
    assert case["ratio"]["wall"]["middle"] > 0
    assert f"{case['ratio']['wall']['middle']:.3f} ±" in printed
    assert len(case["seconds"]["hand"]["wall"]) == len(case["seconds"]["vitpar"]["wall"]) >= 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plan_program_prints_its_tables(tmp_path: Path) -> None:
    printed = run("bench_plans.py", "--json", str(tmp_path / "result.json"))
    found = json.loads((tmp_path / "result.json").read_text())
    assert all(row["activations"] == row["table"] >= row["kept"] for row in found["traffic"])
    assert all(row["weights"] == row["weights_in_theory"] for row in found["traffic"])
    assert all(len(row["idle"]) >= 5 for row in found["bubble"])
    assert {row["mesh"] for row in found["memory"]} == {"dp2", "dp2+zero1", "dp2+zero2", "fsdp2", "pp2", "pp2xfsdp2"}
    assert all(abs(row["rest"] / row["state"] - 1) < 0.1 for row in found["memory"])
    assert all(abs(row["peak"] / row["most"] - 1) < 0.1 for row in found["memory"])
    assert len(found["layerwise"]) == 3
    assert printed.count("in theory") == 3


def test_gpu_program_runs_on_the_cpu_without_the_trainer_s_packages(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--tiny", "--steps", "1", "--no-timm", "--json", str(tmp_path / "result.json"))
    printed = run("bench_gpu.py", *arguments, blocked=("pydantic", "tomli_w", "webdataset", "simplejpeg", "rich"))
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["contender"] for row in rows] == ["vitpar", "plain"]
    assert "relative difference" in printed
    assert printed.count("| vit_tiny_patch16_224, batch 4 |") == 2


def test_gpu_program_refuses_without_a_gpu() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "experiments/bench_gpu.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "no CUDA device can be seen" in done.stderr
    assert "Traceback" not in done.stderr


def test_contenders_take_turns_and_the_order_turns_around() -> None:
    calls: list[str] = []
    contenders = {name: partial(calls.append, name) for name in ("a", "b")}
    times = take_turns(contenders, 3, partial(calls.append, "|"))
    assert "".join(calls) == "|b||a||a||b||b||a|"
    assert len(times["a"].wall) == len(times["b"].cpu) == 3


def test_ratio_is_taken_pair_by_pair() -> None:
    slow_spell = [1.0, 1.0, 10.0, 10.0, 1.0]
    assert ratio([1.1 * s for s in slow_spell], slow_spell) == Spread(pytest.approx(1.1), pytest.approx(0.0))


def test_unlike_losses_are_refused() -> None:
    from bench.rank import compare

    compare([(2.0, 3.0)], [(2.0001, 3.0)])
    with pytest.raises(AssertionError, match=r"gradient norm of step 2 is 3\.0 by hand"):
        compare([(2.0, 3.0)] * 2, [(2.0, 3.0), (2.0, 3.01)])
