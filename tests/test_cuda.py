"""On GPUs, where there are any: plans against one process there, and a run against the same run on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from small_data import pack_small

GPUS = torch.cuda.device_count()
ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def vitpar(*words: str, cwd: Path) -> str:
    """What `vitpar <words>` prints, after it succeeded."""
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT / 'cli'}"
    command = [sys.executable, "-m", "vitpar_cli.main", *words]
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), ("--compile",)], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("mesh", "gpus"), [("dp1+ckpt", 1), ("dp2", 2), ("fsdp2", 2), ("tp2", 2), ("pp2", 2), ("pp2xtp2xdp2", 8)]
)
def test_plan_equals_one_process(
    mesh: str, gpus: int, precision: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")
    found = json.loads(
        vitpar("check", "--mesh", mesh, "--precision", precision, "--device", "cuda", "--json", *options, cwd=tmp_path)
    )
    assert found["passed"], found["worst"]


def test_the_device_does_not_change_the_training(tmp_path: Path) -> None:
    data = pack_small(tmp_path)
    sizes = {"image_size": 8, "patch_size": 2, "width": 24, "depth": 4, "heads": 2, "drop_path": 0.1}
    settings = [f"--set=model.{key}={value}" for key, value in sizes.items()]
    common = ("train", "--data", str(data), "--model", "vit_custom", *settings, "--steps", "10", "--batch-size", "8")
    runs = {}
    for device in ("cpu", "cuda"):
        vitpar(*common, "--precision", "fp64", "--device", device, "--run-dir", device, cwd=tmp_path)
        rows = map(json.loads, (tmp_path / device / "metrics.jsonl").read_text().splitlines())
        runs[device] = [row["loss"] for row in rows]
    assert runs["cuda"] == pytest.approx(runs["cpu"], rel=1e-6)  # images are normalised in fp32
