"""The programs in examples/ run as their docstrings say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

EXAMPLES = ROOT / "examples"


def output(place: Path, *words: str) -> str:
    """Run Python with `words` in `place` and return what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_example_has_a_test() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "own_data.py",
        "own_loop.py",
        "own_model.py",
        "own_task.py",
        "planning.py",
    }


def test_own_data_example_trains(tmp_path: Path) -> None:
    said = output(tmp_path, str(EXAMPLES / "own_data.py"))
    assert "1,437 images of 10 classes" in said
    assert (tmp_path / "runs" / "example" / "weights").is_dir()


@pytest.mark.slow
def test_own_loop_example_has_equal_losses_under_two_plans(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "own_loop.py")]
    one, two = (re.findall(r"loss ([\d.]+)", output(tmp_path, *launch, mesh)) for mesh in ("tp2", "pp2"))
    assert len(one) == 4 and list(map(float, one)) == pytest.approx(list(map(float, two)), abs=2e-3)
    assert float(one[-1]) < 0.5


def test_planning_example_prints_a_plan(tmp_path: Path) -> None:
    assert re.search(r"80GB: dp8\S*, [\d,]+ samples/s, [\d.]+ GB", output(tmp_path, str(EXAMPLES / "planning.py")))
