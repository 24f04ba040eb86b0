"""The programs in examples/ run as their docstrings say."""

import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import vitpar
from helpers.paths import ROOT
from helpers.ranks import RankPool
from helpers.tiny_images import write_tree
from vitpar.data.shards.pack import pack

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
    write_tree(tmp_path / "images")
    said = output(tmp_path, str(EXAMPLES / "own_data.py"), "images")
    assert "21 images of 3 classes" in said
    assert (tmp_path / "runs" / "example" / "weights").is_dir()


def own_loop(device: torch.device, mesh: str) -> list[float]:
    """Run the example in this rank's process group, and return the losses that it prints."""
    kept = ("torch.distributed.init_process_group", "torch.distributed.destroy_process_group", "os._exit")
    with ExitStack() as stack:
        for name in kept:
            stack.enter_context(patch(name))
        stack.enter_context(patch.object(sys, "argv", ["own_loop.py", mesh]))
        printed = stack.enter_context(redirect_stdout(StringIO()))
        runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())]


@pytest.mark.slow
def test_own_loop_example_has_equal_losses_under_two_plans(ranks: Callable[[int], RankPool]) -> None:
    one, two = (ranks(4).run(own_loop, mesh)[0] for mesh in ("tp2xdp2", "pp2xfsdp2"))
    assert len(one) == 4 and one == pytest.approx(two, abs=2e-3)
    assert one[-1] < 0.5


def test_planning_example_prints_a_plan(tmp_path: Path) -> None:
    assert re.search(r"80GB: dp8\S*, [\d,]+ samples/s, [\d.]+ GB", output(tmp_path, str(EXAMPLES / "planning.py")))


def loop(device: torch.device, text: str) -> float:
    """Run a block of code in this rank's process group, and return its loss."""
    names: dict[str, Any] = {}
    with patch("torch.distributed.init_process_group"):
        exec(text, names)
    return names["loss"].item()


def test_the_page_on_python_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Callable[[int], RankPool]
) -> None:
    page = (ROOT / "docs" / "api" / "vitpar.md").read_text()
    train, model, own_loop, search = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    losses = ranks(4).run(loop, own_loop)
    assert losses == losses[:1] * 4 and losses[0] == pytest.approx(math.log(10), rel=1e-3)
    monkeypatch.chdir(tmp_path)
    pack("digits", tmp_path / "data_shards" / "digits")
    names: dict[str, Any] = {}
    for text in (train, model, search):
        exec(text, names)
    assert names["summary"]["steps"] == 23 and names["columns"]["val_loss"][-1] == names["summary"]["loss"]
    assert Path("first.html").exists() and names["best"].memory_bytes <= 40e9
    assert vitpar.__doc__
    shown = [line.partition("  #")[0] for line in re.findall(r"^    (.*)", vitpar.__doc__, re.MULTILINE)]
    assert len(shown) > 8 and [line for line in shown if line.rstrip() not in page] == []
